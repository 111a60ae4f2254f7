"""The fields of a run as a whole."""

from __future__ import annotations

from drivetrain.config.run import RunConfig

WITHOUT = {
    *("name", "output", "scaler", "min_nodes", "max_restarts", "grace_seconds", "hang_seconds"),
    *("micro_batch_size", "micro_batch_tokens", "loop", "schedule", "numerics", "evaluation", "checkpoints"),
    *("tracking", "loader", "seed", "deterministic", "mirror"),
}


def test_every_field_either_decides_on_memory_or_is_known_not_to() -> None:
    deciding = set(RunConfig.deciding_memory())
    assert not deciding & WITHOUT
    assert deciding | WITHOUT == RunConfig.model_fields.keys(), (
        "mark a new field with json_schema_extra=decides_memory if a sample takes more or less memory by it, so that "
        "micro_batch_size: auto looks anew; else name it above"
    )


def test_the_mark_leaves_the_json_schema_as_it_is() -> None:
    schema = RunConfig.model_json_schema()["properties"]
    assert "recompute" in RunConfig.deciding_memory()
    assert schema["recompute"].keys() == {"anyOf", "default", "description", "title"}
