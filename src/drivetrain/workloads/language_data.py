"""Prepares the training data of a language model: tokenizer, samples, and the account of how they came about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drivetrain.config.fine_tuning import SFT
from drivetrain.config.language import LanguageModel
from drivetrain.config.language_data import LanguageData
from drivetrain.config.preference import reads_margins
from drivetrain.data.bad_rows import by_reason
from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.contents import Contents
from drivetrain.data.language.conversation_samples import Cut, conversation_samples
from drivetrain.data.language.conversations import Conversation
from drivetrain.data.language.document_tokens import stored_ids
from drivetrain.data.language.documents import StoredTexts
from drivetrain.data.language.labelled_samples import labelled_samples
from drivetrain.data.language.pair_samples import pair_samples
from drivetrain.data.language.placeholders import placeholders_note
from drivetrain.data.language.prompt_samples import prompt_samples
from drivetrain.data.language.samples import JoinedSamples, TextWindows, Tokenised
from drivetrain.data.language.sets import DataSet, OpenSet, open_sets, refuse_bad_rows
from drivetrain.data.language.step_samples import step_samples
from drivetrain.data.language.stored_conversations import StoredConversations
from drivetrain.data.streams.mixture import Mix, StreamedMixture
from drivetrain.data.streams.rows_set import StreamedRows
from drivetrain.errors import Problem, problem, together
from drivetrain.workloads.language_account import Account, check_any_left, lost_rows
from drivetrain.workloads.language_config import context_of_model
from drivetrain.workloads.language_mix import mix_of
from drivetrain.workloads.language_refusals import read_sets, refused_behind
from drivetrain.workloads.language_streams import LOOKED_AT, Stream
from drivetrain.workloads.language_tokenizer import make_tokenizer
from drivetrain.workloads.stream_notes import travel_note

LEFT_OUT = "are left out"
CUTS: dict[str, Callable[..., Cut[Any]]] = {
    "conversations": conversation_samples,
    "pairs": pair_samples,
    "labelled": labelled_samples,
    "steps": step_samples,
    "prompts": prompt_samples,
}
TRAIN, EVALUATION = "workload.data.train", "workload.data.evaluation"


@dataclass(frozen=True)
class LanguageSamples:
    """evaluation: None for a stream without evaluation data. mix: the weights of several data sets."""

    train: JoinedSamples | StreamedMixture
    evaluation: JoinedSamples | None
    mix: Mix


class LanguageReader:
    """Reads by one config: first its own data, then any others in the same way."""

    def __init__(self, config: LanguageModel, seed: int) -> None:
        self._config, self._data, self.seed = config, config.data, seed
        self._kind, self._margins = config.samples, reads_margins(config.stage)
        self.warnings: list[str] = []
        self.accounts: list[Account] = []
        self.tokenizer: Any = None
        self.template: ChatTemplate | None = None
        self.held: list[Conversation] = []  # of the evaluation data, the first of which prompts may be made
        self.added_tokens: list[str] = []  # that the template needs and the tokenizer lacked

    def read(self) -> LanguageSamples:
        """Reads. Raises UserError with all problems of the sources, then with all rows that cannot be used."""
        data = self._data
        broken: list[Problem] = []
        kept = None if data.stream else broken  # of a stream all other rows are judged when they are needed
        calls: list[Callable[[], Any]] = [
            lambda: open_sets(data.train, data, self._kind, TRAIN, kept, self._margins),
            lambda: open_sets(data.evaluation or [], data, self._kind, EVALUATION, kept, self._margins),
            lambda: mix_of(data),
        ]
        opened, others, mix = refused_behind(broken, lambda: together(calls))
        if data.pairs == "all" and self._kind == "pairs" and not any(each.makes_pairs for each in (*opened, *others)):
            why = "no data set has rows of several answers with a score or a rank each"
            raise problem("workload.data.pairs", why, "leave it out, or name their column, columns: {completions: ...}")
        for note in dict.fromkeys(note for each in (*opened, *others) for note in each.notes):
            self.warn(note)
        if self._config.stage == SFT:
            for name in dict.fromkeys(each.name for each in (*opened, *others) if each.reads_chosen):
                self.warn(f"{name} holds preferences: the chosen answers are trained on")
        train: JoinedSamples | StreamedMixture
        evaluation: Sequence[Tokenised]
        if data.stream:
            self._take_tokenizer([])
            train, evaluation = self._streams(opened, others, mix)
        else:
            read, evaluation = self._read_whole(opened, others, broken)
            train = JoinedSamples(read, mix.in_words)
        if not evaluation:
            self.warn(f"there are no evaluation data: {why_none(data)}; workload.data.evaluation gives some")
        return LanguageSamples(train, JoinedSamples(evaluation) if evaluation else None, mix)

    def read_more(self, path: str, field: str) -> JoinedSamples:
        """Reads other data of the same kind, such as those to predict for. They are read whole, beside a stream too:
        each row has its place, and rows that cannot be read are reported."""
        elsewhere = {"path": path, "samples": None, "subset": None, "split": "train", "folder": None}
        source, data = self._data.train[0].model_copy(update=elsewhere), self._data.model_copy(update={"stream": False})
        broken: list[Problem] = []
        opened = refused_behind(broken, lambda: open_sets([source], data, self._kind, field, broken, self._margins))
        read = read_sets({field: opened}, broken, data, self.seed)
        read.check(self.template, data)
        ((samples, _),) = self._made_of(read.of[field], 0.0, [], field)
        return JoinedSamples([samples])

    def _read_whole(
        self, opened: Sequence[OpenSet], others: Sequence[OpenSet], broken: Sequence[Problem]
    ) -> tuple[list[Tokenised], list[Tokenised]]:
        found = {TRAIN: opened, EVALUATION: others}
        rows = read_sets(found, broken, self._data, self.seed)
        sets, held = rows.of[TRAIN], rows.of[EVALUATION]
        refused_behind(rows.problems, lambda: self._take_tokenizer(sets))
        rows.check(self.template, self._data)
        for each in (*sets, *held):
            if each.warning:
                self.warn(each.warning)
            self._warn_of_placeholders(each.conversations, each.name)
        accounts = self.accounts
        fraction = self._data.evaluation_fraction if not others else 0.0
        made, given = together(
            [
                lambda: self._made_of(sets, fraction, accounts, TRAIN),
                lambda: self._made_of(held, 0.0, accounts, EVALUATION),
            ]
        )
        for account in accounts:
            if lost := lost_rows([account]):
                self.warn(f"of the {account.rows or 0:,} rows of {account.name} {LEFT_OUT}: {lost}")
            if account.bad:
                self.warn(
                    f"rows of {account.name} that cannot be used and {LEFT_OUT}: {'; '.join(by_reason(account.bad))}"
                )
        train, own = [first for first, _ in made], accounts[: len(sets)]
        weighted = self._data.train[0].weight is not None or self._data.mix != "concat"
        for part in [[account] for account in own] if weighted else [own]:
            check_any_left(part, TRAIN)
        if not others:
            return train, [second for _, second in made if len(second)]
        check_any_left(accounts[len(sets) :], EVALUATION)
        return train, [first for first, _ in given]

    def _take_tokenizer(self, sets: Sequence[DataSet]) -> None:
        made = make_tokenizer(self._config, Contents(sets))
        self.tokenizer, self.template, self.added_tokens = made.tokenizer, made.template, made.added

    def _warn_of_placeholders(self, conversations: Sequence[Conversation], name: str, among: str = "") -> None:
        if isinstance(conversations, StoredConversations) and not conversations.has_placeholders:
            return
        note = placeholders_note(conversations, name, among)
        if note is not None:
            self.warn(note)

    # --- samples -----------------------------------------------------------------------------------------------------

    def _made_of(
        self, sets: Sequence[DataSet], fraction: float, accounts: list[Account], field: str
    ) -> list[tuple[Tokenised, Tokenised]]:
        """Returns each set's samples, and those of its held-out share. accounts: theirs are added."""
        made = []
        for dataset in sets:
            account = Account(dataset.name, dataset.rows, list(dataset.bad), for_evaluation=field == EVALUATION)
            accounts.append(account)
            account.paired = (dataset.usable, len(dataset.conversations)) if dataset.makes_pairs else None
            train, held = (self._windows if self._kind == "texts" else self._chatted)(dataset, fraction, account)
            account.samples, account.held_out = len(train), len(held)
            made.append((train, held))
        own = accounts[len(accounts) - len(sets) :]  # with what the template refused
        counted = [DataSet(each.name, each.rows or 0, bad=each.bad) for each in own]
        refuse_bad_rows(counted, field, self._data.bad_rows)
        return made

    def _windows(self, dataset: DataSet, fraction: float, account: Account) -> tuple[Tokenised, Tokenised]:
        """Makes windows. The end of the set's text is held out."""
        del account
        ids, length = self._ids(dataset), self._data.length
        kept = len(ids) - round(len(ids) * fraction)
        name = dataset.name
        return TextWindows(ids[:kept], length, name, self.seed), TextWindows(ids[kept:], length, f"{name}, held out,")

    def _ids(self, dataset: DataSet) -> np.ndarray:
        """Returns the ids of all its texts, one after the other, each ended by the tokenizer's eos if there are
        several."""
        texts = dataset.texts
        contents = texts if isinstance(texts, StoredTexts) else [text.content for text in texts]
        end = [] if len(contents) < 2 or self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        if len(contents) > 1 and not end:
            self.warn(f"the tokenizer has no eos token: the texts of {dataset.name} follow each other without a mark")

        ids, warning = stored_ids(contents, end, self.tokenizer, self._data.cache)
        if warning:
            self.warn(warning)
        return ids

    def _chatted(self, dataset: DataSet, fraction: float, account: Account) -> tuple[Tokenised, Tokenised]:
        """Makes samples of conversations. Rows drawn at random are held out; one that gives several samples with all of
        them."""
        order = np.random.default_rng(self.seed).permutation(dataset.usable)
        count = round(dataset.usable * fraction)
        held, kept = (dataset.of_rows(np.sort(part)) for part in (order[:count], order[count:]))
        self._hold(dataset.conversations if account.for_evaluation else held)
        cuts = [self._cut(part, account) for part in (kept, held)]
        return cuts[0].samples, cuts[1].samples

    def _hold(self, conversations: Sequence[Conversation]) -> None:
        for talk in conversations:  # one by one: those on disk may be millions
            if len(self.held) >= self._most_held:
                return
            if not self.held or self.held[-1].where != talk.where:  # pairs of one row have one prompt
                self.held.append(talk)

    @property
    def _most_held(self) -> int:
        """Returns the most conversations to hold out. Some may be too long for a prompt."""
        return 0 if self._config.generate is None else 8 * self._config.generate.samples

    def _cut(self, conversations: Sequence[Conversation], account: Account) -> Cut[Any]:
        assert self.template is not None
        more: dict[str, Any] = {}
        context: int | None = None
        if self._kind == "prompts":  # answers to a prompt need places of the model's context behind it
            context = context_of_model(self._config, self.tokenizer)
            more = {"context": context}
        elif self._kind == "steps":
            more = {"separator": self._config.preference.step_separator}
        cut = CUTS[self._kind](conversations, self.template, self.tokenizer, self._data, **more)
        if context is not None and len(cut.samples):
            self._warn_of_little_room(int(cut.samples.prompts.lengths.max()), context, account.name)
        account.bad += cut.bad
        account.truncated += cut.truncated
        account.too_long += cut.too_long
        account.without_target += cut.without_target
        account.alike += cut.alike
        self._tell(cut, account.name, "become one sample a reply, each as inference sees it")
        if cut.warning:
            self.warn(cut.warning)
        return cut

    def _warn_of_little_room(self, longest: int, context: int, name: str) -> None:
        wanted = self._config.reinforcement.max_new_tokens
        if longest + wanted > context:
            left = f"after its {longest} tokens the model's context of {context} has room for {context - longest} more"
            self.warn(f"the longest prompt of {name}: {left}, and reinforcement.max_new_tokens is {wanted}")

    def _tell(self, cut: Cut[Any], name: str, fate: str) -> None:
        assert self.template is not None
        if cut.split_conversations:
            rewritten = f"{cut.split_conversations} conversations of {name} {fate}"
            self.warn(f"{self.template.name} rewrites earlier turns: {rewritten}")
        if cut.boundary_mismatches:
            self.warn(
                f"of {cut.boundary_checked} prompts of {name} that were looked at, {cut.boundary_mismatches} "
                "have other tokens at inference, where nothing follows them: the tokenizer joins prompt and reply"
            )
        if cut.unended:
            self.warn(
                f"in {cut.unended} samples of {name}, {self.template.name} closes {{% generation %}} before the token "
                "that ends the reply: the model is not taught to end"
            )

    def _streams(
        self, opened: Sequence[OpenSet], others: Sequence[OpenSet], mix: Mix
    ) -> tuple[StreamedMixture, list[StreamedRows]]:
        """Returns the training's data sets as a mixture, and those to evaluate on: data of their own, or rows held
        out."""
        data = self._data
        train, evaluation = (
            [Stream(each, self.tokenizer, self.template, data, field) for each in sets]
            for sets, field in ((opened, TRAIN), (others, EVALUATION))
        )
        together([stream.check_beginning for stream in (*train, *evaluation)])
        for stream in (*train, *evaluation):
            self._introduce(stream)
        held = evaluation or (train if data.evaluation_rows else [])
        drawn = [stream.training(self.seed, number) for number, stream in enumerate(train)]
        for each in drawn:
            self.warn(travel_note(each, data.stream_buffer))
        for account, rows in zip(self.accounts, drawn, strict=False):
            account.rows, account.samples = rows.rows.known, rows.rows.known or 0
        return StreamedMixture(drawn, mix), [stream.evaluation() for stream in held]

    def _introduce(self, stream: Stream) -> None:
        opened = stream.opened
        account = Account(opened.name, None, for_evaluation=stream.field == EVALUATION)
        if account.for_evaluation:
            account.rows = account.samples = len(stream.evaluation())
        else:
            account.held_out = stream.held_out
        self.accounts.append(account)
        if self.template is None:
            self.warn(f"a stream has one sample a text: of {opened.name}, the first {self._data.length} tokens of each")
            return
        _, first, _ = stream.beginning()
        if account.for_evaluation or stream.held_out:
            self._hold(stream.held_talks(self._most_held))
        self._warn_of_placeholders(first, opened.name, f"the first {LOOKED_AT} rows of ")
        self._tell(stream.cut(first), opened.name, "are trained on up to their first reply only")

    def warn(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)


def why_none(data: LanguageData) -> str:
    """Returns why there are no evaluation data."""
    if data.stream:
        return "a stream holds nothing out unless evaluation_rows says so"
    share = f"evaluation_fraction={data.evaluation_fraction:g}"
    return f"{share} of so little data holds none out" if data.evaluation_fraction else "none are held out"
