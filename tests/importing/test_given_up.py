"""Tests what has no counterpart and changes what is trained: nothing is written, unless it is given up by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.errors import UserError
from drivetrain.importing.verb import import_files
from tests.importing.made import asked_to_give_up, of_text, read, small

Run = Callable[..., tuple[int, str, str]]
SFT = "stage: sft\nfinetuning_type: full\nmodel_name_or_path: a/b\ndataset: one\ntemplate: qwen\n"
ARGUMENTS = '{"output_dir": "o", "max_steps": 3, '
DEEPSPEED = '{"train_batch_size": 8, '
XTUNER = "train_cfg = dict(max_iters=4)\n"


@pytest.mark.parametrize(
    ("text", "ending", "key"),
    [
        (SFT + "use_asft_loss: true\nref_model_adapters: c/d\n", ".yaml", "ref_model_adapters"),
        *(
            (SFT + f"{key}: true\n", ".yaml", key)
            for key in ("mixture_of_depths", "shift_attn", "use_badam", "use_mca")
        ),
        (SFT + "neftune_noise_alpha: 5\nlabel_smoothing_factor: 0.1\n", ".yaml", "label_smoothing_factor"),
        (SFT + "use_galore: true\noptim: adafactor\n", ".yaml", "use_galore"),
        (SFT + "moe_aux_loss_coef: 0.1\n", ".yaml", "moe_aux_loss_coef"),
        (SFT + "optim: lion\n", ".yaml", "optim"),
        (SFT + "lr_scheduler_type: reduce_lr_on_plateau\n", ".yaml", "lr_scheduler_type"),
        (SFT + "num_train_epochs: 0.5\n", ".yaml", "num_train_epochs"),
        (SFT.replace("qwen", "default"), ".yaml", "template"),
        (SFT + "image_max_pixels: 262144\n", ".yaml", "image_max_pixels"),
        (SFT + "video_fps: 2.0\n", ".yaml", "video_fps"),
        (SFT + "freeze_vision_tower: false\n", ".yaml", "freeze_vision_tower"),
        *(
            (SFT.replace("qwen", name), ".yaml", "template")
            for name in ("qwen2_vl", "llava_next_video", "minicpm_v", "mistral_small")
        ),
        (XTUNER + "model = dict(visual_encoder=dict(type='CLIP'))", ".py", "model.visual_encoder.type"),
        (SFT.replace("sft", "grpo"), ".yaml", "stage"),
        (SFT.replace("sft", "dpo") + "ref_model_adapters: c/d\n", ".yaml", "ref_model_adapters"),
        (SFT.replace("sft", "kto") + "pref_ftx: 0.5\n", ".yaml", "pref_ftx"),
        (SFT.replace("full", "bone"), ".yaml", "finetuning_type"),
        (SFT + "use_llama_pro: true\n", ".yaml", "use_llama_pro"),
        (ARGUMENTS + '"label_smoothing_factor": 0.1}', ".json", "label_smoothing_factor"),
        (ARGUMENTS + '"neftune_noise_alpha": 5}', ".json", "neftune_noise_alpha"),
        (ARGUMENTS + '"accelerator_config": {"split_batches": true}}', ".json", "accelerator_config.split_batches"),
        (ARGUMENTS + '"optim_args": "a=1"}', ".json", "optim_args"),
        (DEEPSPEED + '"optimizer": {"type": "OneBitAdam", "params": {"lr": 1}}}', ".json", "optimizer.type"),
        (DEEPSPEED + '"scheduler": {"type": "OneCycle", "params": {}}}', ".json", "scheduler.type"),
        (DEEPSPEED + '"zero_optimization": {"zero_quantized_gradients": true}}', ".json", None),
        (DEEPSPEED + '"compression_training": {"a": 1}}', ".json", "compression_training.a"),
        ("distributed_type: MEGATRON_LM\nnum_processes: 8\n", ".yaml", "distributed_type"),
        (XTUNER + "param_scheduler = dict(type='StepLR', gamma=2)", ".py", "param_scheduler.type"),
        (XTUNER + "load_from = 'w.pth'", ".py", "load_from"),
        (XTUNER + "model = dict(lora=dict(type='IA3Config'))", ".py", "model.lora.type"),
        (XTUNER + "auto_scale_lr = dict(enable=True, base_batch_size=16)", ".py", None),
    ],
)
def test_nothing_is_written_that_trains_something_else(text: str, ending: str, key: str | None, tmp_path: Path) -> None:
    file, output = of_text(tmp_path, text, ending), tmp_path / "new.yaml"
    with pytest.raises(UserError) as refused:
        import_files([file], small(tmp_path), output)
    asked = asked_to_give_up(refused.value)
    assert len(asked) == len(refused.value.problems)
    assert key is None or asked == [key]
    assert not output.exists()
    import_files([file], small(tmp_path), output, without=asked)
    assert output.exists()


@pytest.mark.parametrize(
    "text",
    [
        SFT + "group_by_length: true\nreport_to: wandb\ndisable_shuffling: true\ndataloader_drop_last: true\n",
        SFT + "use_dft_loss: false\nuse_badam: false\nlabel_smoothing_factor: 0.0\nmoe_aux_loss_coef: 0.0\n",
        SFT + "use_audio_in_video: false\nimage_do_pan_and_scan: false\nfreeze_language_model: false\n",
        SFT.replace("qwen", "vicuna"),
        SFT + "flash_attn: fa3\nupcast_layernorm: true\nmy_own_key: 3\nuse_unsloth: true\n",
    ],
)
def test_what_trains_the_same_without_it_is_listed_alone(text: str, tmp_path: Path) -> None:
    assert import_files([of_text(tmp_path, text)], None, tmp_path / "new.yaml").run is not None


def test_all_such_keys_of_all_files_are_reported_at_once_beside_other_problems(tmp_path: Path) -> None:
    one = of_text(tmp_path, SFT + "use_badam: true\nlearning_rate: quick\n")
    other = of_text(tmp_path, DEEPSPEED + '"sparse_gradients": true}', ".json")
    with pytest.raises(UserError) as refused:
        import_files([one, other], None, tmp_path / "new.yaml")
    assert {each.field.rpartition(": ")[2] for each in refused.value.problems} >= {
        *("use_badam", "learning_rate", "sparse_gradients"),
    }


def test_a_block_gives_up_its_keys_and_a_name_that_drops_nothing_is_refused(tmp_path: Path) -> None:
    file = of_text(tmp_path, DEEPSPEED + '"compression_training": {"a": 1, "b": {"c": 2}}}', ".json")
    import_files([file], None, tmp_path / "new.yaml", without=["compression_training"])
    with pytest.raises(UserError, match="--without compression: no such key is dropped"):
        import_files([file], None, tmp_path / "other.yaml", without=["compression_training", "compression"])
    assert not (tmp_path / "other.yaml").exists()


def test_exit_codes_tell_a_run_file_that_trains_from_one_that_cannot_yet(
    drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n")
    (tmp_path / "losing.yaml").write_text(SFT + "label_smoothing_factor: 0.1\n")
    small(tmp_path)
    code, _, reported = drivetrain("import", "engine.yaml")
    assert code == 1
    assert "missing workload, batch_size, loop: the run file is incomplete and cannot train" in reported
    assert (tmp_path / "engine-run.yaml").exists()
    assert drivetrain("import", "engine.yaml", "--onto", "small.yaml", "-o", "whole.yaml")[0] == 0
    code, _, reported = drivetrain("import", "losing.yaml")
    assert code == 2
    assert "the loss is the workload's" in reported
    assert "--without label_smoothing_factor" in reported
    assert not (tmp_path / "losing-run.yaml").exists()
    assert drivetrain("import", "losing.yaml", "--without", "label_smoothing_factor")[0] == 0
    assert read(tmp_path / "losing-run.yaml")["workload"]["stage"] == "sft"
    assert "label_smoothing_factor: the loss is" in (tmp_path / "losing-run.yaml").read_text()


def test_an_unknown_stage_names_those_there_are(tmp_path: Path) -> None:
    file = of_text(tmp_path, SFT.replace("sft", "grpo"), ".yaml")
    with pytest.raises(UserError) as refused:
        import_files([file], None, tmp_path / "new.yaml")
    reported = str(refused.value)
    assert "grpo: there are pt, sft, dpo, kto, rm, ppo" in reported
    assert "no workload is written, and what is trained is that of --onto RUN.YAML" in reported


def test_a_tokenizer_without_a_chat_template_leaves_the_run_file_incomplete(tmp_path: Path, drivetrain: Run) -> None:
    model = tmp_path / "base"
    model.mkdir()
    (model / "tokenizer_config.json").write_text("{}")
    (tmp_path / "rows.json").write_text('[{"instruction": "a", "output": "b"}]')
    (tmp_path / "dataset_info.json").write_text('{"one": {"file_name": "rows.json"}}')
    text = SFT.replace("a/b", str(model)).replace("qwen", "llama3") + f"dataset_dir: {tmp_path}\nmax_steps: 2\n"
    file = of_text(tmp_path, text, ".yaml")
    code, _, reported = drivetrain("import", str(file), "-o", str(tmp_path / "new.yaml"))
    assert code == 1
    assert f"missing workload.data.template (the tokenizer in {model} has no chat template" in reported
    assert "the chat_template.jinja that the Instruct model of its family has" in reported
    assert "has no chat template" in (tmp_path / "new.yaml").read_text()
    (model / "chat_template.jinja").write_text("{{ messages }}")
    code, _, reported = drivetrain("import", str(file), "-o", str(tmp_path / "new.yaml"), "--overwrite")
    assert code == 0, reported
