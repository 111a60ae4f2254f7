"""Language models: the training stage, and the texts or conversations to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from drivetrain.config.base import Frozen, MaybeEmpty, PathOrId, doc
from drivetrain.config.workload_block import WorkloadBlock

MOST_DROPPED = 0.05  # share of a data set's rows that "drop" leaves out; more is seldom meant
BadRows = Literal["error", "drop"] | Annotated[float, Field(gt=0, le=1, strict=True)]


def most_dropped(bad_rows: BadRows) -> float:
    """Returns a field for the largest share of a data set's rows that may be left out."""
    if isinstance(bad_rows, float):
        return bad_rows
    return MOST_DROPPED if bad_rows == "drop" else 0.0


class LanguageModelModel(Frozen):
    path: PathOrId | None = doc("Transformers causal language model to start from: a local folder or a hub id", None)
    trust_remote_code: bool = doc(
        "Run Python code that lies beside the model at path (docs/reference/security.md)", False
    )
    config: dict[str, Any] | None = doc(
        "Transformers config of a model made from scratch: model_type and its fields", None
    )
    tokenizer: PathOrId | None = doc(
        "A folder or hub id; bytes, characters or bpe are made from the training data. "
        "Left out, model.path's, or bytes from scratch",
        None,
    )
    trust_tokenizer_code: bool = doc(
        "Run Python code that lies beside the tokenizer (docs/reference/security.md)", False
    )
    vocabulary_size: int | None = doc("Tokens of a bpe tokenizer", None, gt=256)
    resize_vocabulary: bool = doc("Add rows to the embedding for tokens that the tokenizer has beyond them", False)
    attention: Literal["auto", "eager", "sdpa", "flash", "flex"] = doc(
        "Attention kernel; auto takes the quickest that is installed", "auto"
    )
    rope_scaling: dict[str, Any] | None = doc(
        "Longer contexts: {type: linear, dynamic, yarn or llama3, factor: ...}", None
    )
    train_last_blocks: int | None = doc("Train the last blocks only, so many, and freeze the rest", None, gt=0)
    neftune_alpha: float | None = doc("Noise on the embeddings while training (NEFTune); 5 is usual", None, gt=0)
    fused_loss: bool | Literal["auto"] = doc(
        "Compute head and loss in pieces, without ever holding all logits; auto does so where they are many", "auto"
    )


Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
StagedWeight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Step = Annotated[int, Field(ge=0)]


class Separated(Frozen):
    """Documents that a text separates."""

    separator: Annotated[str, Field(min_length=1)] = doc("The text between two documents, such as <|endoftext|>")


Documents = Literal["file", "line", "blank_line"] | Separated


class DataSource(Frozen):
    """One data set of a mixture."""

    path: PathOrId = doc("A file, a folder of files, a name in the registry, or a hub id")
    formatting: Literal["auto", "text", "alpaca", "sharegpt", "openai"] = doc(
        "What a row holds; auto looks at the first rows", "auto"
    )
    columns: dict[str, str] = doc("Names of columns as LLaMA-Factory gives them: {prompt: ..., response: ...}", {})
    tags: dict[str, str] = doc("Names inside a message as LLaMA-Factory gives them: {role_tag: ...}", {})
    subset: str | None = doc("Hub only: the subset (configuration)", None)
    split: str = doc("Hub only: the split", "train")
    folder: str | None = doc("Hub only: the folder inside the data set", None)
    samples: int | None = doc("Use this many rows, drawn at random; of a stream the first ones", None, gt=0)
    weight: Weight | dict[Step, StagedWeight] | None = doc(
        "Share of the samples, relative to the other data sets'; left out, every row once. {0: 3, 1000: 1} changes it "
        "at these steps (a curriculum); 0 leaves the set out for a while",
        None,
    )
    max_passes: float | None = doc(
        "Go through the data set at most so often an epoch; what its weight asks beyond goes to the others", None, gt=0
    )
    replace: dict[str, MaybeEmpty] = doc("Texts put in the place of others, such as {'{{name}}': Ada}", {})


def _sources(given: Any) -> Any:
    """Returns a list for a path, a block, or a list of either."""
    listed = given if isinstance(given, list) else [given]
    return [{"path": each} if isinstance(each, str) else each for each in listed]


Sources = Annotated[list[DataSource], BeforeValidator(_sources), Field(min_length=1)]


class LanguageData(Frozen):
    train: Sources = doc("A file, folder, registered name or hub id; a block with more to say; or a list of them")
    evaluation: Sources | None = doc("Evaluation data, same form; held out of train if left out", None)
    evaluation_fraction: float = doc(
        "Share of train held out when evaluation is not given; 0 holds nothing out",
        0.1,
        ge=0,
        lt=1,
    )
    registry: Path | None = doc("LLaMA-Factory's dataset_info.json, or its folder: data sets by name", None)
    documents: Documents = doc(
        "pretrain: what is one document of a text file: the file, each line, or what stands between blank lines or, "
        "with {separator: ...}, between a text",
        "file",
    )
    length: int = doc("Tokens of a sample: of each window of text, at most of a conversation", 256, gt=1)
    template: PathOrId | None = doc(
        "Chat template: alpaca, chatml, plain, vicuna or a Jinja file; left out, the tokenizer's", None
    )
    system: MaybeEmpty | None = doc("sft: the system message of conversations that have none", None)
    train_on: Literal["responses", "last_response", "all"] = doc("sft: the tokens that are targets", "responses")
    too_long: Literal["truncate", "drop", "error"] = doc("sft: what to do with a sample of more tokens", "truncate")
    bad_rows: BadRows = doc(
        "Rows that cannot be used: error refuses them all at once; drop leaves out up to 5 % of a data set; a number, "
        "up to that share",
        "error",
    )
    packing: bool = doc("sft: lay the samples of a micro-batch end to end, without padding; same result", True)
    fixed_rows: bool | Literal["auto"] = doc(
        "Packed rows: fill each up to one length, so that shapes never change; same result. auto: on a GPU, and where "
        "blocks are compiled",
        "auto",
    )
    group_by_length: bool = doc("sft without packing: cut batches into micro-batches of like length", True)
    mix: Literal["concat", "interleave_under", "interleave_over"] = doc(
        "An epoch of several data sets: concat, as many samples as there are; interleave_under, until the first set is "
        "through; interleave_over, until each set was gone through once (LLaMA-Factory's mix_strategy)",
        "concat",
    )
    stream: bool = doc(
        "Read and tokenise rows when they are needed: shards in a shuffled order, rows within stream_buffer", False
    )
    stream_buffer: int = doc("Rows shuffled together in a stream", 10_000, gt=0)
    evaluation_rows: int = doc(
        "stream: evaluate on the first so many rows of each data set, and train on the others", 0, ge=0
    )
    cache: Path | None = doc("Folder for tokenised data; left out, drivetrain's folder in the user's cache", None)


OF_CONVERSATIONS = {"sft"}  # training stages whose samples are conversations; those of the others are texts


class Generation(Frozen):
    """Prompts that the model answers at each evaluation."""

    samples: int = doc("Prompts from the evaluation data: its first conversations or texts", 4, ge=0)
    prompts: list[str] = doc("Prompts of your own; for sft, what the user says", [])
    prompt_tokens: int = doc("pretrain: the first tokens of a text that are its prompt", 32, gt=0)
    max_new_tokens: int = doc("Tokens of an answer, at most", 64, gt=0)
    temperature: float = doc("0 takes the likeliest token; above, tokens are drawn, by the run's seed", 0.0, ge=0)


class LanguageModel(WorkloadBlock):
    type: Literal["language_model"] = doc("Task", "language_model")
    stage: Literal["pretrain", "sft"] = doc(
        "pretrain: the next token of texts; sft: the replies of conversations (supervised fine-tuning)", "pretrain"
    )
    model: LanguageModelModel = doc("Model to train")
    data: LanguageData = doc("Texts or conversations")
    generate: Generation | None = doc("Let the model answer prompts at each evaluation; {} asks four", None)

    @property
    def implementation(self) -> str:
        return f"{self.type}: {self.stage}"

    @property
    def has_conversations(self) -> bool:
        """Whether samples are conversations, whose replies are trained."""
        return self.stage in OF_CONVERSATIONS

    @property
    def is_packed(self) -> bool:
        return self.has_conversations and self.data.packing

    @property
    def lengths_vary(self) -> bool:
        return True

    @property
    def may_fuse_loss(self) -> bool:
        return self.model.fused_loss is not False
