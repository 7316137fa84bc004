"""megatrain train --method: TRL's methods over a streamed model, beside TRL's own over the plain one."""
from __future__ import annotations

import json
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import parity
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("trl")
from safetensors.torch import load_file
from test_cli import MARKED, TEXT, bytes_tokenizer, lines, megatrain, refused, toy_model

import megatrain_torch as mt
from megatrain_torch.commands import data, folder, loop, models, records, train

PARTS = [TEXT[i:i + 40] for i in range(0, 1600, 40)]
RECORDS = {
    "pairs": [{"prompt": p[:15], "chosen": p[15:30], "rejected": p[15:30].upper()} for p in PARTS],
    "kto": [{"prompt": p[:15], "completion": p[15:30], "label": i % 2 == 0} for i, p in enumerate(PARTS)],
    "chats": [{"prompt": [{"role": "user", "content": p[:15]}], "chosen": [{"role": "assistant", "content": p[15:30]}],
               "rejected": [{"role": "assistant", "content": p[15:30].upper()}]} for p in PARTS],
    "grpo": [{"prompt": p[:15]} for p in PARTS]}
DATA = {"dpo": "pairs", "orpo": "pairs", "reward": "pairs", "kto": "kto", "grpo": "grpo"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("methods")
    model = toy_model()
    model.config.attention_dropout = 0.0
    model.save_pretrained(where / "toy")
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template, tokenizer.pad_token = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", ""), "<end>"
    tokenizer.save_pretrained(where / "toy")
    for name, found in RECORDS.items():
        (where / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in found))
    (where / "r.py").write_text("def many(completions, **_):\n    return [float(len(set(c))) for c in completions]\n")
    return where


def words(here: Path, method: str, out: str, data: str | None = None) -> list[Any]:
    more = ["--reward", f"{here}/r.py:many", "--max_completion_length", 6, "--num_generations", 4] * (method == "grpo")
    return ["train", here / "toy", here / f"{data or DATA[method]}.jsonl", "--method", method, "--out", here / out, "--seq", 64,
            "--tokens", 512, "--lr", 1e-3, "--validation", 0, "--save-every", 100, *more]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run) if "loss" in line]


@pytest.mark.parametrize("method, lora", parity.turns(list(DATA), [None, "r=4"]))
def test_a_method_has_the_losses_of_trls_own_over_the_plain_model(here: Path, method: str, lora: str | None,
                                                                  tmp_path: Path) -> None:
    import datasets
    run, steps = here / f"{method}-{lora}", 20 if lora is None else 6
    assert megatrain(*words(here, method, run.name), "--steps", steps, *["--lora", lora] * (lora is not None)) == 0
    settings = folder.settings_of(run).with_(out=str(tmp_path))
    torch.manual_seed(settings.seed)
    tokenizer = models.load_tokenizer(str(here / "toy"))
    model = models.load_model(str(here / "toy"), "float32", scores=method == "reward")
    if lora is not None:
        model = models.adapted(model, settings.lora, settings.seed)
    (parts, _) = train.parts_of(settings, tokenizer)
    kind, _ = loop.classes(method)
    more = {"reward_funcs": loop.rewards(settings)} if method == "grpo" else {}
    trainer = kind(model, args=loop.arguments(settings, False), processing_class=tokenizer,
                   train_dataset=datasets.Dataset.from_list([p.record for p in parts[0]]), **more)
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    trainer.optimizer = torch.optim.AdamW([{"params": [p for p in trained if p.ndim >= 2]},
                                           {"params": [p for p in trained if p.ndim < 2]}], lr=settings.lr,
                                          betas=(0.9, settings.beta2), weight_decay=0.0)
    trainer.train()
    wanted = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(wanted) == steps and losses(run) == pytest.approx(wanted, abs=1e-5)
    assert method == "grpo" or wanted[-1] < wanted[0], "it learns"


@pytest.mark.parametrize("method, data", [("dpo", "chats"), ("grpo", "grpo")])
def test_a_method_that_was_told_to_stop_goes_on_to_the_same_bits(here: Path, method: str, data: str,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain_torch.commands.loop import Streamed
    whole, half, log = f"{method}-whole", here / f"{method}-half", Streamed.log
    assert megatrain(*words(here, method, whole, data), "--steps", 5) == 0

    def stop_in_step_2(self: Any, logs: dict[str, Any], *args: Any) -> None:
        log(self, logs, *args)
        if self.state.global_step == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Streamed, "log", stop_in_step_2)
        assert megatrain(*words(here, method, half.name, data), "--steps", 5) == 130
    assert megatrain("resume", half) == 0
    assert losses(half) == losses(here / whole)
    files = [(here / name / "model/model.safetensors").read_bytes() for name in (whole, half.name)]
    assert files[0] == files[1]


@pytest.mark.parametrize("more", [(), ("--lora", "r=4"), ("--early-stopping", 9, "--validation", 0.2, "--eval-every", 1)],
                         ids=["dpo", "lora", "best"])
def test_a_run_that_ended_behind_its_last_step_writes_what_it_has_learned(here: Path, more: tuple[Any, ...]) -> None:
    run = here / f"last-{len(more)}"
    assert megatrain(*words(here, "dpo", run.name), "--steps", 3, "--save-every", 1, "--keep", 9, "--lr", 0.3, *more) == 0
    [file] = (run / "model").glob("*.safetensors")
    wanted = load_file(file)
    file.unlink(), (run / "model").rename(here / f"old-{len(more)}")
    assert megatrain("resume", run) == 0
    found = load_file(file)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_two_processes_have_the_losses_of_one(here: Path) -> None:
    found = []
    for gpus in (1, 2):
        assert megatrain(*words(here, "dpo", f"by{gpus}"), "--steps", 3, "--gpus", gpus) == 0
        found.append(losses(here / f"by{gpus}"))
    assert found[1] == pytest.approx(found[0], abs=1e-5) and len(found[0]) == 3


def test_early_stopping_takes_the_best_weights_and_trainers_names_are_taken(here: Path, capsys: Any) -> None:
    (here / "my.txt").write_text(TEXT[:3000])
    run = here / "early"
    assert megatrain("train", here / "toy", here / "my.txt", "--out", run, "--seq", 64, "--tokens", 128, "--learning-rate", 0.3,
                     "--max-steps", 30, "--early-stopping", 2, "--eval-every", 1, "--neftune-noise-alpha", 5,
                     "--warmup", 0, "--lr_scheduler_type", "constant") == 0
    said = capsys.readouterr().out
    found = {line["step"]: line["eval_loss"] for line in lines(run) if "eval_loss" in line}
    best = min(found, key=found.get)
    assert max(found) == best + 2 < 30 and f"the best was checkpoint-{best}" in said
    weights = [load_file(run / name / "model.safetensors") for name in (f"checkpoint-{best}", "model")]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    settings = folder.settings_of(run)
    assert (settings.lr, settings.steps, settings.more) == (0.3, 30, {"neftune_noise_alpha": "5"})


@pytest.mark.parametrize("more, name", [
    (("--push-to-hub", "me/it"), "me/it"), (("--push_to_hub", "true"), "pushed"),
    (("--push_to_hub", "true", "--hub_model_id", "me/it"), "me/it"), (("--hub_model_id", "me/it"), "me/it")], ids=str)
def test_a_model_is_pushed_by_names_of_ours_or_trainers(here: Path, more: tuple[str, ...], name: str,
                                                        monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import huggingface_hub
    made = []
    monkeypatch.setattr(huggingface_hub, "create_repo", lambda name, private, exist_ok: (
        made.append((name, private)), types.SimpleNamespace(repo_id=f"of/{name}"))[1])
    monkeypatch.setattr(huggingface_hub, "upload_folder", lambda repo_id, folder_path: (
        made.append((repo_id, folder_path.name)), "https://there")[1])
    (here / "my.txt").write_text(TEXT[:3000])
    assert megatrain("train", here / "toy", here / "my.txt", "--out", here / "pushed", "--overwrite", "--seq", 64, "--tokens", 128,
                     "--max-steps", 1, "--run_name", "mine", "--hub_private_repo", "true", *more) == 0
    assert made == [(name, True), (f"of/{name}", "model")] and "is on the hub: https://there" in capsys.readouterr().out
    assert "hub_token: megatrain says that itself" in refused(capsys, "train", here / "toy", here / "my.txt", "--hub_token", "x")


@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_records_that_seq_has_no_room_for_are_told(here: Path, method: str, capsys: Any) -> None:
    long = {"prompt": "a" * 80, "chosen": "b" * 80, "rejected": "c" * 80}
    (here / "long.jsonl").write_text(8 * (json.dumps(long) + "\n"))
    assert "--seq 64 is too short for all 8 records" in refused(capsys, *words(here, method, "l", "long"))
    (here / "some.jsonl").write_text(json.dumps(long) + "\n" + (here / "pairs.jsonl").read_text())
    assert megatrain(*words(here, method, f"some-{method}", "some"), "--steps", 1) == 0
    assert "1 of 41 records are left out" in capsys.readouterr().out


def test_what_a_method_does_not_take_is_said_first(here: Path, capsys: Any) -> None:
    for given, said in [
        (("dpo", "kto"), "record 1 has 'prompt', 'completion', 'label' and no chosen: --method dpo trains on records of"),
        (("kto", "pairs"), "no completion"), (("sft", "pairs"), "--method dpo, orpo or reward trains on such")]:
        assert said in refused(capsys, *words(here, given[0], "n", given[1]))
    for more, said in [(("--sed", 1), "did you mean 'seed'"), (("--learning_rat", 1), "there is no 'learning_rat'; did you mean 'lr'?"),
                       (("--beta", "much"), "argument --beta: invalid float value: 'much'"),
                       (("--bf16", "true"), "bf16: megatrain says that itself"), (("--label_smoothing_factor", 0.1), "has no such smoothing"),
                       (("--early-stopping", 2), "validation=0: nothing is held out")]:
        assert said in refused(capsys, *words(here, "dpo", "n"), *more), more
    assert "needs --reward FILE.py:FUNCTION" in refused(capsys, *words(here, "grpo", "n")[:7])
    assert not (here / "n").exists()


@pytest.mark.parametrize("method, record, prompt", [
    ("dpo", {"question": "a", "chosen": "b", "rejected": "c"}, "a"), ("grpo", {"instruction": "a", "input": "d"}, "a\n\nd"),
    ("kto", {"query": "a", "completion": "b", "label": "true"}, "a")])
def test_records_of_other_names_are_read(method: str, record: dict[str, Any], prompt: str) -> None:
    plain, chatty = (records.Template(bytes_tokenizer()) for _ in range(2))
    chatty.tokenizer.chat_template = MARKED
    found = data.pair(record, method, chatty, "here").record
    assert found["prompt"] == [{"role": "user", "content": prompt}]
    assert "chosen" not in found or found["chosen"] == [{"role": "assistant", "content": "b"}]
    assert found.get("label", True) is True
    assert data.pair(record, method, plain, "here").record["prompt"].count(prompt.split()[0])


def test_records_come_to_trl_as_they_are_written(tmp_path: Path) -> None:
    """Fields that the first one has not, and objects of different keys, in their order: a template shows them."""
    tokenizer, one = bytes_tokenizer(), RECORDS["chats"][0]
    tokenizer.chat_template = MARKED
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"z": 1}}}], "content": ""}
    tools = [[{"type": "function", "function": {"name": name, "description": "", "parameters": {name: {"type": "string"}}}}]
             for name in "fg"]
    given = [one, {**one, "prompt": [*one["prompt"], call], "tools": tools[0], "chat_template_kwargs": {"b": 1, "a": 2}},
             {**one, "tools": tools[1]}, {"chosen": [*one["prompt"], *one["chosen"]],
                                          "rejected": [*one["prompt"], *one["rejected"]], "tools": ""}]
    loop._as_table([d.record for d in data.documents(given, tokenizer, method="dpo")]).save_to_disk(tmp_path / "a")
    import datasets
    found = list(datasets.load_from_disk(tmp_path / "a"))
    wanted = [{"tools": None, "chat_template_kwargs": {}, **(one if "prompt" not in r else r)} for r in given]
    assert [{n: json.dumps(r[n]) for n in sorted(r)} for r in found] == [{n: json.dumps(r[n]) for n in sorted(r)} for r in wanted]


def test_a_record_that_trl_would_end_at_is_left_out(capsys: Any) -> None:
    import datetime
    tokenizer, one = bytes_tokenizer(), RECORDS["chats"][0]
    tokenizer.chat_template = MARKED + "{% if messages[0].role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
    for bad, words in [({**one, "prompt": [{"role": "tool", "content": ""}]}, "the chat template does not take it: no"),
                       ({**one, "tools": 3}, "tools must be a list"),
                       ({**one, "chosen": [{"role": "assistant", "content": "\ud800"}]}, "no text")]:
        assert len(data.documents([bad, one], tokenizer, method="dpo")) == 1
        assert words in capsys.readouterr().out
    dated = {"prompt": "a", "when": datetime.date(2024, 1, 1)}
    assert len(data.documents([dated, {"prompt": "b"}], tokenizer, method="grpo")) == 1
    assert "it has a date of Python, which JSON has not" in capsys.readouterr().out


def test_trainers_settings_of_adamw_come_to_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    own = mt.AdamW
    monkeypatch.setattr(mt, "AdamW", lambda *args, **kw: made.append(own(*args, **kw)) or made[-1])
    (here / "my.txt").write_text(TEXT[:500])
    assert megatrain("train", here / "toy", here / "my.txt", "--out", here / "adam", "--seq", 16, "--steps", 1,
                     "--tokens", 64, "--validation", 0, "--adam_beta1", 0.5, "--adam_epsilon", 1e-3) == 0
    assert (made[0].defaults["betas"], made[0].defaults["eps"]) == ((0.5, 0.95), 1e-3)


def test_a_trainer_does_not_move_the_plain_model_and_its_reference_is_streamed_too(
        here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a plain model would go there whole."""
    import datasets
    import trl
    from transformers import Trainer
    moved = []
    monkeypatch.setattr(Trainer, "_move_model_to_device", lambda self, model, device: moved.append(device))
    args = trl.DPOConfig(str(tmp_path), use_cpu=True, bf16=False, max_steps=1, report_to=[])
    model, reference = (models.load_model(str(here / "toy"), "float32") for _ in range(2))
    trainer = mt.stream_trainer(trl.DPOTrainer, model, args, ref_model=reference,
                                train_dataset=datasets.Dataset.from_list(RECORDS["pairs"]),
                                processing_class=models.load_tokenizer(str(here / "toy")),
                                optimizer=lambda m: mt.AdamW(m.parameters(), lr=1e-3))
    assert not moved and type(args) is trl.DPOConfig and trainer.args.place_model_on_device is None
    assert isinstance(trainer.optimizer, mt.AdamW) and not any(p.requires_grad for p in reference.parameters())
    for one in (model, reference):
        assert mt.explain(one), "it is streamed"
    trainer.train()
    assert not torch.equal(model.lm_head.weight, reference.lm_head.weight), "the head of TRL has a gradient"


def trl_steps(here: Path, method: str, out: Path, **stream_with: Any) -> tuple[list[dict[str, float]], int]:
    """Two steps of TRL's trainer: (what it logged, elements of the largest tensor in them). Without stream_with the
    model is plain."""
    import datasets
    import trl
    from test_deferred import Largest
    seen, settings = Largest(), types.SimpleNamespace(method=method, reward=f"{here}/r.py:many")
    kind, config = (trl.SFTTrainer, trl.SFTConfig) if method == "sft" else loop.classes(method)
    more = {"dpo": {"precompute_ref_log_probs": True}, "kto": {"precompute_ref_log_probs": True},
            "grpo": {"max_completion_length": 24, "num_generations": 4}}.get(method, {})
    args = config(str(out), use_cpu=True, bf16=False, max_steps=2, report_to=[], logging_steps=1, learning_rate=1e-2,
                  save_strategy="no", gradient_checkpointing=False, **more)

    class Watched(kind):
        def training_step(self, *given: Any, **kw: Any) -> Any:
            with seen:
                return super().training_step(*given, **kw)

    records = [{"text": text} for text in PARTS] if method == "sft" else RECORDS[DATA.get(method, "pairs")]
    given: dict[str, Any] = {"train_dataset": datasets.Dataset.from_list(records),
                             "processing_class": models.load_tokenizer(str(here / "toy"))}
    if method == "grpo":
        given["reward_funcs"] = loop.rewards(settings)
    model = models.load_model(str(here / "toy"), "float32", scores=method == "reward")
    torch.manual_seed(0)
    if stream_with:
        trainer = mt.stream_trainer(Watched, model, args, stream_with=stream_with, **given,
                                    optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
    else:
        trainer = Watched(model, args=args, **given)
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line], seen.nbytes


@pytest.mark.parametrize("method", ["sft", *DATA, "cpo"])
def test_no_trainer_of_trl_makes_logits_where_the_head_defers(here: Path, method: str, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's own heads take a tile at a time; ORPO and CPO read the model's logits, and have the same figures without them."""
    from megatrain_torch.fused import loss
    monkeypatch.setitem(loop.CLASSES, "cpo", ("trl.experimental.cpo", "CPO"))
    monkeypatch.setattr("trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE", 16)
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 128)
    monkeypatch.setattr(loss, "chunk_tokens", lambda *_: 16)
    logged, largest = trl_steps(here, method, tmp_path, compute="fused")
    tokens = 8 * 24                      # at least, of a step
    assert largest < 4 * tokens * 257
    if method in ("orpo", "cpo"):
        wanted, whole = trl_steps(here, method, tmp_path)
        assert whole >= 4 * tokens * 257, "the look itself is blind"
        for line, other in zip(logged, wanted, strict=True):
            assert line.keys() == other.keys()
            for name in ("loss", "nll_loss", "grad_norm", "logps/chosen", "rewards/margins", "logits/chosen", "logits/rejected"):
                assert line[name] == pytest.approx(other[name], rel=1e-3, abs=2e-5), name


def test_only_training_imports_trl() -> None:
    code = "import sys, megatrain_torch.cli; sys.exit(bool({'trl', 'datasets', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
