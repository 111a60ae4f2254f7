// Exchanges the token for a cookie. The token comes in the address behind the #, which is sent to no server.
const [form, field, answer] = ["form", "token", "answer"].map((id) => document.getElementById(id));
const FAILED = {
  401: "This token is not right. 令牌不正确。",
  429: "Too many wrong tokens: wait a minute. 错误次数过多，请一分钟后再试。",
};

async function enter(token) {
  answer.textContent = "";
  let reply;
  try {
    reply = await fetch("login", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ token }) });
  } catch {
    answer.textContent = "The server cannot be reached. 无法连接服务器。";
    return;
  }
  if (reply.ok) location.replace("./");
  else answer.textContent = FAILED[reply.status] ?? (await reply.json().catch(() => null))?.error?.message ?? `HTTP ${reply.status}`;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  enter(field.value.trim());
});
const token = decodeURIComponent(location.hash.slice(1));
history.replaceState(null, "", location.pathname);
if (token) enter(token);
else if ((await fetch("api/me").catch(() => null))?.ok) location.replace("./");
