"""What a language model is trained on, made ready: tokenizer, samples, and the account of how they came about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from drivetrain.config.language import LanguageModel
from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.conversation_form import RowError
from drivetrain.data.language.conversation_formats import BadRow
from drivetrain.data.language.conversation_samples import Cut, conversation_samples
from drivetrain.data.language.conversations import Conversation
from drivetrain.data.language.samples import JoinedSamples, Sample, StreamedSamples, TextWindows, Tokenised
from drivetrain.data.language.sets import DataSet, OpenSet, Text, open_sets, read_set, refuse_bad_rows
from drivetrain.data.order import Part
from drivetrain.data.token_cache import Arrays, cached, content_key
from drivetrain.errors import problem, together
from drivetrain.workloads.language_tokenizer import make_tokenizer

TRAIN, EVALUATION = "workload.data.train", "workload.data.evaluation"


@dataclass
class Account:
    """What happened to the rows of one data set. for_evaluation: of those given for it."""

    name: str
    rows: int
    bad: list[BadRow] = field(default_factory=list)
    samples: int = 0
    held_out: int = 0  # samples for evaluation, taken out of the training data
    truncated: int = 0
    too_long: int = 0
    without_target: int = 0
    for_evaluation: bool = False


@dataclass(frozen=True)
class LanguageSamples:
    """evaluation: None for a stream without evaluation data. parts: the mixture, where weights were given."""

    train: JoinedSamples
    evaluation: JoinedSamples | None
    parts: list[Part] | None


class LanguageReader:
    """Reads by one config: first its own data, then any others in the same way."""

    def __init__(self, config: LanguageModel, seed: int) -> None:
        self._config, self._data, self._seed = config, config.data, seed
        self._chats = config.stage == "sft"
        self.warnings: list[str] = []
        self.accounts: list[Account] = []
        self.tokenizer: Any = None
        self.template: ChatTemplate | None = None
        self.added_tokens: list[str] = []  # that the template needs and the tokenizer lacked

    def read(self) -> LanguageSamples:
        """UserError with all that is wrong with the sources, then with all rows that cannot be used."""
        data = self._data
        given = data.evaluation
        opened, others = together(
            [
                lambda: open_sets(data.train, data, self._chats, TRAIN),
                lambda: open_sets(given or [], data, self._chats, EVALUATION),
            ]
        )
        weights = _weights(opened)
        if data.stream:
            self._take_tokenizer([])
            train = [self._streamed(each) for each in opened]
            evaluation = [self._streamed(each) for each in others]
        else:
            train, evaluation = self._read_whole(opened, others)
        joined = JoinedSamples(train)
        parts = None
        if weights is not None:
            parts = [Part(a, b, w) for a, b, w in zip(joined.starts, joined.starts[1:], weights, strict=False)]
        return LanguageSamples(joined, JoinedSamples(evaluation) if evaluation else None, parts)

    def read_more(self, path: str, field: str) -> JoinedSamples:
        """Other data of the same kind, such as those to predict for."""
        source = self._data.train[0].model_copy(update={"path": path, "samples": None})
        (opened,) = open_sets([source], self._data, self._chats, field)
        dataset = read_set(opened, self._seed, field)
        refuse_bad_rows([dataset], field)
        return JoinedSamples([self._made(dataset, 0.0)[0]])

    def _read_whole(
        self, opened: Sequence[OpenSet], others: Sequence[OpenSet]
    ) -> tuple[list[Tokenised], list[Tokenised]]:
        sets = together([lambda each=each: read_set(each, self._seed, TRAIN) for each in opened])  # type: ignore[misc]
        held = together([lambda each=each: read_set(each, self._seed, EVALUATION) for each in others])  # type: ignore[misc]
        if self._data.bad_rows == "error":
            together([lambda: refuse_bad_rows(sets, TRAIN), lambda: refuse_bad_rows(held, EVALUATION)])
        for note in dict.fromkeys(note for each in (*sets, *held) for note in each.notes):
            self.warn(note)
        contents = [text.content for each in sets for text in each.texts]
        contents += [message.content for each in sets for c in each.conversations for message in c.messages]
        self._take_tokenizer(contents)
        fraction = self._data.evaluation_fraction if not others else 0.0
        made = [self._made(each, fraction) for each in sets]
        train = [first for first, _ in made]
        if not sum(map(len, train)):
            bad = sum(len(account.bad) for account in self.accounts)
            why = f"no sample is left of {sum(each.rows for each in sets)} rows; {bad} of them cannot be used"
            raise problem(TRAIN, why, "see what drivetrain data says of them")
        if not others:
            return train, [second for _, second in made if len(second)]
        return train, [self._made(each, 0.0, for_evaluation=True)[0] for each in held]

    def _take_tokenizer(self, contents: Sequence[str]) -> None:
        made = make_tokenizer(self._config, contents)
        self.tokenizer, self.template, self.added_tokens = made.tokenizer, made.template, made.added

    # --- samples -----------------------------------------------------------------------------------------------------

    def _made(self, dataset: DataSet, fraction: float, for_evaluation: bool = False) -> tuple[Tokenised, Tokenised]:
        """The samples of a set, and of the share of it that is held out."""
        account = Account(dataset.name, dataset.rows, list(dataset.bad), for_evaluation=for_evaluation)
        self.accounts.append(account)
        train, held = (self._chatted if self._chats else self._windows)(dataset, fraction, account)
        account.samples, account.held_out = len(train), len(held)
        return train, held

    def _windows(self, dataset: DataSet, fraction: float, account: Account) -> tuple[Tokenised, Tokenised]:
        """The end of the set's text is held out."""
        del account
        ids, length = self._ids(dataset), self._data.length
        kept = len(ids) - round(len(ids) * fraction)
        name = dataset.name
        return TextWindows(ids[:kept], length, name, self._seed), TextWindows(ids[kept:], length, f"{name}, held out,")

    def _ids(self, dataset: DataSet) -> np.ndarray:
        """All its texts, one after the other, each ended by the tokenizer's eos where there are several."""
        contents = [text.content for text in dataset.texts]
        end = [] if len(contents) < 2 or self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        if len(contents) > 1 and not end:
            self.warn(f"the tokenizer has no eos token: the texts of {dataset.name} follow each other without a mark")

        def make() -> Arrays:
            found = [self._encoded(content) + end for content in contents]
            return {"ids": np.concatenate([np.zeros(0, np.int32), *(np.array(ids, np.int32) for ids in found)])}

        held, warning = cached(self._data.cache, content_key(["texts", end], self.tokenizer, contents), make, bool)
        if warning:
            self.warn(warning)
        return held["ids"]

    def _chatted(self, dataset: DataSet, fraction: float, account: Account) -> tuple[Tokenised, Tokenised]:
        """Conversations drawn at random are held out; one that gives several samples with all of them."""
        conversations = dataset.conversations
        order = np.random.default_rng(self._seed).permutation(len(conversations))
        count = round(len(conversations) * fraction)
        held, kept = np.sort(order[:count]), np.sort(order[count:])
        cuts = [self._cut([conversations[i] for i in part], account) for part in (kept, held)]
        return cuts[0].samples, cuts[1].samples

    def _cut(self, conversations: list[Conversation], account: Account, keeps: bool = True) -> Cut:
        assert self.template is not None
        cut = conversation_samples(conversations, self.template, self.tokenizer, self._data, keeps)
        if cut.bad and self._data.bad_rows == "error":
            refused = DataSet(account.name, account.rows, bad=cut.bad)
            refuse_bad_rows([refused], EVALUATION if account.for_evaluation else TRAIN)
        account.bad += cut.bad
        account.truncated += cut.truncated
        account.too_long += cut.too_long
        account.without_target += cut.without_target
        if cut.split_conversations:
            self.warn(
                f"{self.template.name} rewrites earlier turns: {cut.split_conversations} conversations of "
                f"{account.name} become one sample a reply, each as inference sees it"
            )
        if cut.boundary_mismatches:
            self.warn(
                f"of {cut.boundary_checked} prompts of {account.name} that were looked at, {cut.boundary_mismatches} "
                "have other tokens at inference, where nothing follows them: the tokenizer joins prompt and reply"
            )
        if cut.warning:
            self.warn(cut.warning)
        return cut

    def _encoded(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    # --- streams -----------------------------------------------------------------------------------------------------

    def _streamed(self, opened: OpenSet) -> Tokenised:
        self.accounts.append(Account(opened.name, len(opened.rows), samples=len(opened.rows)))

        def read(start: int, stop: int) -> list[Sample]:
            rows = opened.rows.read(start, stop)
            return [self._one(opened, row, start + place) for place, row in enumerate(rows)]

        return StreamedSamples(len(opened.rows), read, opened.rows.where)

    def _one(self, opened: OpenSet, row: dict[str, Any], index: int) -> Sample:
        """A row's sample; of one that cannot be used, where that is no error, a sample without targets."""
        try:
            if opened.form is None:
                return self._text_sample(opened.text(row, index))
            account = Account(opened.name, len(opened.rows))
            cut = self._cut([opened.conversation(row, index)], account, keeps=False)
            if len(cut.samples):
                return cut.samples.load(0, 0)  # of a template that rewrites history, the first reply's
        except RowError as error:
            if self._data.bad_rows == "error":
                fix = "correct or remove the row, or give workload.data.bad_rows=drop"
                raise problem(TRAIN, f"{opened.rows.where(index)}: {error}", fix) from None
        return np.zeros(2, np.int32), np.zeros(2, dtype=bool)

    def _text_sample(self, text: Text) -> Sample:
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        ids = np.array((self._encoded(text.content) + end)[: self._data.length], dtype=np.int32)
        return ids, np.ones(len(ids), dtype=bool)

    def warn(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)


def _weights(opened: Sequence[OpenSet]) -> list[float] | None:
    weights = [each.source.weight for each in opened]
    given = [weight for weight in weights if weight is not None]
    if not given:
        return None
    if len(given) < len(weights):
        names = ", ".join(each.name for each in opened if each.source.weight is None)
        raise problem(TRAIN, f"some data sets have a weight, but not {names}", "give all of them a weight, or none")
    return given
