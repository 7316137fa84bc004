"""The command line: what is asked for, rows of tokens, and a run from its first step to what it wrote."""
from __future__ import annotations

import ast
import contextlib
import datetime
import errno
import importlib.util
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatrain_torch as mt
from megatrain_torch import MegatrainError, cli
from megatrain_torch.checkpoint import manifest
from megatrain_torch.commands import data, folder, models, records
from megatrain_torch.commands.folder import write_yaml
from megatrain_torch.commands.settings import Settings

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "examples/data/tinyshakespeare.txt").read_text()
MARKED = ("{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
          "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
          "{% if add_generation_prompt %}assistant: {% endif %}")
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "so"}, {"role": "assistant", "content": "la"}]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bytes_tokenizer() -> Any:
    """A token for each byte, and one for the end."""
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast
    letters = {c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters | {"<end>": 256}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def toy_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=None, eos_token_id=256, max_position_embeddings=128,
        attention_dropout=0.1))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("toy")
    toy_model().save_pretrained(where)
    bytes_tokenizer().save_pretrained(where)
    return str(where)


def test_the_verbs_use_the_package_by_its_public_names() -> None:
    files = [ROOT / "megatrain_torch/cli.py", *(ROOT / "megatrain_torch/commands").glob("*.py")]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.level > 1 or (node.module or "").startswith("megatrain_torch")):
                assert node.module == "megatrain_torch" and {a.name for a in node.names} <= {*mt.__all__}, (path, node.lineno)
            elif isinstance(node, ast.ImportFrom) and node.level and path == files[0]:
                assert node.module.split(".")[0] == "commands", (path, node.lineno)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mt":
                assert node.attr in mt.__all__, (path, node.lineno)


# ---- settings ------------------------------------------------------------------------------------

@pytest.mark.parametrize("values, words", [
    ({"batch_size": 1}, "no 'batch_size'; did you mean 'tokens'"),
    ({"learning_rate": 1, "lr": 1}, "no 'learning_rate'; did you mean 'lr'"),
    ({"lr": "fast"}, "lr='fast': a number"),
    ({"steps": 1.5}, "steps=1.5: a whole number"),
    ({"seed": True}, "seed=True: a whole number"),
    ({"schedule": "cosinus"}, "use one of cosine"),
    ({"validation": 0.9}, "validation=0.9: a number from 0 to 0.5 is needed"),
    ({"keep": 0}, "keep=0: at least 1 is needed"),
    ({"lr": 0}, "lr=0.0: more than 0 is needed"),
    ({"vram": "much"}, "is not a size"),
    ({"host": "24"}, "host='24' is 24 bytes: give a unit, such as '24GiB'"),
    ({"seq": 100, "tokens": 250}, "nearest: tokens=200"),
    ({"clip": -1}, "clip=-1.0: 0 or more is needed"),
    ({"clip": "nan"}, "clip='nan': a number is needed"),
    ({"lr": "inf"}, "lr='inf': a number is needed"),
    ({"push_to_hub": True, "model": 7}, "model=7: a word"),
    ({"weight_decay": -0.1}, "weight_decay=-0.1: a number from 0 to 1 is needed"),
], ids=str)
def test_a_setting_that_makes_no_sense_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(MegatrainError) as why:
        Settings.of(values, "here")
    assert words in str(why.value)


def test_yaml_may_write_a_number_as_a_word() -> None:
    assert Settings.of({"lr": "1e-5", "steps": "3"}, "") == Settings(lr=1e-5, steps=3)


def test_yaml_may_have_dates_and_numbers_where_words_are_needed() -> None:
    pytest.importorskip("trl")
    from megatrain_torch.commands import loop
    settings = Settings.of({"out": "o", "run_name": datetime.date(2024, 1, 1), "lr_scheduler_kwargs": {"min_lr": 1e-6}}, "")
    assert loop.given(settings) == {"run_name": "2024-01-01", "lr_scheduler_kwargs": '{"min_lr": 1e-06}'}
    with pytest.raises(MegatrainError, match="there is no '3'"):
        loop.given(Settings.of({3: 4}, ""))


def test_an_unknown_flag_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["eval", "m", "d", "--colum", "3"])
    assert "did you mean '--column'" in capsys.readouterr().err
    assert "did you mean 'tokens'" in refused(capsys, "train", "m", "d", "--batch-size", "3")
    with pytest.raises(SystemExit):
        cli.main(["train", "m", "d", "--overwrit"])
    assert "did you mean '--overwrite'" in capsys.readouterr().err


@pytest.mark.parametrize("words, said", [
    ([], "say what to do: train, resume, eval,"),
    (["trian", "m", "d"], "there is no 'trian'; did you mean 'train'?"),
], ids=str)
def test_a_verb_that_is_none_is_refused_with_those_there_are(words: list[str], said: str,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(words)
    assert said in capsys.readouterr().err


def test_the_page_has_the_settings_of_today() -> None:
    spec = importlib.util.spec_from_file_location("cli_page", ROOT / "tools/cli_page.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = tool.PAGE.read_text()
    assert tool.renewed(text, tool.page()) == text, "run python tools/cli_page.py"


# ---- data ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, content, words", [
    ("a.jsonl", b'\n{"text": }\n', "a.jsonl:2: not JSON"),
    ("a.jsonl", b"[1]\n", "a.jsonl:1: an object"),
    ("a.jsonl", b'{"body": "a"}\n', "a.jsonl: record 1 has 'body' and no messages, prompt or text; name the field"),
    ("a.jsonl", b'{"prompt": "a"}\n', "a.jsonl: record 1 has 'prompt': a prompt needs a completion"),
    ("a.jsonl", b'{"text": "a"\n', "a.jsonl:1: not JSON: Expecting ',' delimiter: line 1 column 13"),
    ("a.json", b'[\n{"text": 1]\n', "a.json: not JSON: Expecting ',' delimiter: line 2 column 11"),
    ("a.jsonl", b'{"text": "\xe9"}\n', "a.jsonl:1: byte 10 is not UTF-8"),
    ("a.jsonl", b'{"text": null}\n', "record 1: text is null: a text, or a list of messages, is needed"),
    ("a.jsonl", b'{"messages": "hi"}\n', "record 1: messages is a str: a list of messages is needed"),
    ("a.jsonl", b'{"text": 3}\n', "a.jsonl: record 1: text is a int"),
    ("a.jsonl", json.dumps({"messages": TALK}).encode(), "no chat template"),
    ("a.jsonl", json.dumps({"prompt": TALK}).encode(), "record 1: prompt is a list of messages and needs a completion"),
    ("a.jsonl", json.dumps({"prompt": TALK, "completion": "a"}).encode(), "prompt and completion must be texts, or lists"),
    ("a.jsonl", json.dumps({"prompt": "a", "response": TALK}).encode(), "prompt and response must be texts, or lists"),
    ("a.jsonl", json.dumps({"prompt": TALK, "completion": []}).encode(), "or lists of messages with words in both"),
    ("a.jsonl", b'{"conversations": "hi"}\n', "record 1: conversations is a str: a list of messages is needed"),
    ("a.txt", b"\xff\xfe", "byte 0 is not UTF-8"),
    ("a.txt", b"caf\xe9", "iconv -f LATIN1 -t UTF-8"),
    ("a.txt", b"", "a.txt has no tokens to train on: it is empty"),
    ("b/readme", b"", "no file in it ends in"),
], ids=str)
def test_data_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(MegatrainError) as why:
        data.documents(records.records(str(path.parent if "/" in name else path)), bytes_tokenizer(), None, str(path))
    assert words in str(why.value)


def test_data_of_another_form_or_out_of_reach_is_named(tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = MARKED
    with pytest.raises(MegatrainError, match=r"here: record 1: message 1 has 'by', 'value'; `role` .* are needed"):
        data.documents([{"messages": [{"by": "human", "value": "hi"}]}], tokenizer, None, "here")
    with pytest.raises(MegatrainError, match=r"message 1 is from 'it', and known are human, user, gpt, .*; rename it"):
        data.documents([{"conversations": [{"from": "it", "value": "hi"}]}], tokenizer, None, "here")
    for beside, words in [({"tools": 3}, "must be a list of tools"), ({"tools": "["}, "tools: not JSON"),
                          ({"chat_template_kwargs": None, "tools": []}, None),
                          ({"chat_template_kwargs": [1]}, "must be a list of tools, and chat_template_kwargs an obj")]:
        with pytest.raises(MegatrainError, match=words) if words else contextlib.nullcontext():
            data.documents([{"messages": TALK, **beside}], tokenizer, None, "here")
    with pytest.raises(MegatrainError, match=r"/proc/self/mem: cannot be read \(Input/output error\)"):
        list(records.records("/proc/self/mem"))
    (tmp_path / "notes.md").mkdir()
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfwords")
    assert list(records.records(str(tmp_path))) == [{"text": "words"}], "a mark of UTF-8 is no text"
    (tmp_path / "texts").touch()
    with pytest.raises(MegatrainError, match=f"did you mean {tmp_path / 'texts'}"):
        list(records.records(str(tmp_path / "text")))


def trained_words(document: data.Document) -> list[str]:
    """What is trained, a word for each stretch."""
    text, found = bytes_tokenizer(), [[]]
    for token, trained in zip(document.ids, document.trained):
        if trained:
            found[-1].append(int(token))
        elif found[-1]:
            found.append([])
    return [text.decode(part) for part in found if part]


both_templates = pytest.mark.parametrize(
    "template", [MARKED, MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")],
    ids=["its own marks", "by prefixes"])


@both_templates
def test_of_a_conversation_the_assistants_words_are_trained(template: str) -> None:
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = template
    [found] = data.documents([{"messages": TALK}], tokenizer)
    assert trained_words(found) == ["ho<end>", "la<end>"] and found.whole
    other = [{"from": "human" if m["role"] == "user" else "gpt", "value": m["content"]} for m in TALK]
    [same] = data.documents([{"conversations": other}], tokenizer)
    assert same.ids.tolist() == found.ids.tolist() and same.trained.tolist() == found.trained.tolist()


@both_templates
def test_of_a_prompt_of_messages_only_the_completion_is_trained(template: str) -> None:
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = template
    [found] = data.documents([{"prompt": TALK[:3], "completion": TALK[3:]}], tokenizer)
    [whole] = data.documents([{"messages": TALK}], tokenizer)
    assert found.ids.tolist() == whole.ids.tolist() and trained_words(found) == ["la<end>"] and found.whole
    tokenizer.chat_template = "{{ messages | length }} messages: " + template
    [found] = data.documents([{"prompt": TALK[:3], "completion": TALK[3:]}], tokenizer)
    assert tokenizer.decode(found.ids).startswith("3 messages: user: hi"), "as the model is asked"
    assert trained_words(found) == ["la<end>"]


@both_templates
def test_the_chat_template_has_a_records_tools_and_words_of_its_own(template: str) -> None:
    tokenizer, tools = bytes_tokenizer(), [{"type": "function", "function": {"name": "add"}}]
    tokenizer.chat_template = "{{ (tools or [])[0].function.name }} {{ mood }}|" + template
    beside = {"tools": tools, "chat_template_kwargs": {"mood": "kind"}}
    for record in ({"messages": TALK}, {"prompt": TALK[:1], "completion": TALK[1:2]}):
        for tools_here in (tools, json.dumps(tools)):
            [found] = data.documents([{**record, **beside, "tools": tools_here}], tokenizer)
            assert tokenizer.decode(found.ids).startswith("add kind|user: hi")
            assert trained_words(found)[0] == "ho<end>"


def test_of_a_prompt_the_completion_is_trained() -> None:
    [found] = data.documents([{"prompt": "one ", "completion": "two"}], bytes_tokenizer())
    assert trained_words(found) == ["two<end>"]


def piece(begin: int, length: int, whole: bool) -> data.Document:
    return data.Document(np.arange(begin, begin + length, dtype=np.int32), np.ones(length, bool), whole)


@given(st.lists(st.tuples(st.integers(1, 25), st.booleans()), min_size=1, max_size=12), st.integers(2, 12))
@settings(max_examples=60, deadline=None)
def test_rows_hold_every_token_once_and_predict_none_across_documents(spec: list[tuple[int, bool]], seq: int) -> None:
    found = [piece(100 * (i + 1), n, whole) for i, (n, whole) in enumerate(spec)]
    made = data.packed(found, seq, filler=7)
    kept = sorted(t for d in found for t in d.ids[:seq if d.whole else None].tolist())
    assert sorted(made.ids[made.ids != 7].tolist()) == kept
    for ids, row in zip(made.ids, map(made.__getitem__, range(len(made)))):
        positions, labels = row["position_ids"].numpy(), row["labels"].numpy()
        for at in range(seq):
            follows = at > 0 and positions[at] == positions[at - 1] + 1
            assert positions[at] == 0 or follows
            if follows and ids[at] != 7:
                assert ids[at] == ids[at - 1] + 1 and labels[at] == ids[at], "it goes on, and is a target"
            else:
                assert labels[at] == data.IGNORED


def test_a_text_shares_no_row_with_what_fills_its_last_one() -> None:
    """So attention has whole rows. What fills it is behind all that is learned."""
    one, two = (data.packed([piece(100, 30, False)] * n, 8, filler=7) for n in (1, 2))
    assert not one.begins[:, 1:].any() and two.begins[:, 1:].any()
    assert one[3]["position_ids"].tolist() == list(range(8)) and one[3]["labels"].tolist() == [-100, *range(125, 130), -100, -100]


def test_a_packed_row_has_the_losses_of_its_documents_alone() -> None:
    model, rng = toy_model().eval(), np.random.default_rng(0)
    ids = [rng.integers(0, 256, n).astype(np.int32) for n in (9, 17, 5, 30)]
    made = data.packed([data.Document(i, np.ones(len(i), bool), True) for i in ids], 40, 0)
    batch = data.collate(False)([made[i] for i in range(len(made))])

    def total(batch: dict[str, torch.Tensor]) -> float:
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(),
                                                 ignore_index=data.IGNORED, reduction="sum").item()

    with torch.no_grad():
        alone = [total({"input_ids": (t := torch.from_numpy(i.astype(np.int64))[None]), "labels": t}) for i in ids]
        flat = {k: v.reshape(1, -1) for k, v in batch.items()}
        # fp32 sums in another order: some ulps of a few hundred nats.
        assert total(batch) == pytest.approx(sum(alone), rel=1e-6)
        assert total(flat) == pytest.approx(sum(alone), rel=1e-6)


def small_opt() -> Any:
    """A model in which documents of one row see each other."""
    import transformers as tf
    torch.manual_seed(0)
    return tf.OPTForCausalLM(tf.OPTConfig(
        vocab_size=257, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, bos_token_id=None, pad_token_id=None,
        eos_token_id=256, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0, max_position_embeddings=128))


@torch.no_grad()
def leak(model: Any, flat: bool) -> float:
    """How far logits of one document move with what another before it says, in parts of how far apart they are. Weights
    are made so large that what one token has of another is seen."""
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, 0, p[0].numel() ** -0.5)
    one, *others = torch.randint(50, (3, 8), generator=torch.Generator().manual_seed(0))
    again = torch.arange(8).repeat(2)
    rows = [{"input_ids": torch.cat([other, one]), "position_ids": again} for other in (*others, one)]
    logits = model.float().eval()(**data.collate(flat)(rows), use_cache=False).logits.view(3, 2, 8, -1)
    first = logits[2, 0]                             # nothing is before it
    return max((logits[row, 1] - first).square().mean().sqrt().item() for row in range(3)) / first.std().item()


@pytest.mark.parametrize("kind", sorted(data.SEPARATE))
def test_documents_of_kinds_that_share_rows_do_not_see_each_other(kind: str) -> None:
    import fusing
    import test_fused
    import test_moe
    import zoo
    small = {"vocab_size_per_layer_input": zoo.V}
    known = test_fused.FAMILIES | test_moe.FAMILIES | {
        "gemma3": fusing.lm("gemma3", text_config=zoo.DECODER, vision_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}),
        "gemma3_text": test_fused.FAMILIES["gemma3"], "gemma4_text": fusing.lm("gemma4_text", **small),
        "gemma4": fusing.lm("gemma4", text_config=zoo.DECODER | small, vision_config=None, audio_config=None)}
    model = known.get(kind, fusing.lm(kind))()
    assert model.config.model_type == kind
    assert max(leak(model, flat) for flat in (False, True)) < 1e-4, "more than rounding in fp32: 1e-6 was seen"


def test_a_known_kind_whose_code_or_attention_was_not_asked_shares_no_rows() -> None:
    import fusing
    import transformers as tf
    other = fusing.lm("llama", is_causal=False)()        # as embedding models have it: a mask without position_ids
    assert leak(other, False) > 0.05 and not data.separate(other.config) and data.separate(tf.LlamaConfig())
    assert not data.separate(tf.LlamaConfig(attn_implementation="flash_attention_2")), "it looks at one row's positions"
    assert not data.separate(type("Own", (tf.LlamaConfig,), {"__module__": "transformers_modules.own"})())


@pytest.mark.parametrize("flat", [False, True], ids=["rows", "flat"])
def test_a_leak_is_seen(flat: bool) -> None:
    assert leak(small_opt(), flat) > 0.05 and "opt" not in data.SEPARATE


@given(st.lists(st.tuples(st.integers(1, 25), st.booleans()), min_size=1, max_size=8), st.integers(2, 12))
@settings(max_examples=30, deadline=None)
def test_rows_of_one_document_hold_every_token_once(spec: list[tuple[int, bool]], seq: int) -> None:
    found = [piece(100 * (i + 1), n, whole) for i, (n, whole) in enumerate(spec)]
    made = data.packed(found, seq, filler=7, alone=True)
    kept = sorted(t for d in found for t in d.ids[:seq if d.whole else None].tolist())
    assert sorted(made.ids[made.ids != 7].tolist()) == kept and made.alone
    for ids, row in zip(made.ids, map(made.__getitem__, range(len(made)))):
        labels = row["labels"].numpy()
        length = int((ids != 7).sum())
        assert (ids[:length] == np.arange(ids[0], ids[0] + length)).all(), "one document, from its row's beginning"
        assert (labels[1:length] == ids[1:length]).all() and (labels[length:] == data.IGNORED).all()


def test_what_is_held_out_is_not_trained() -> None:
    train, held = data.held_out([piece(0, 50, False), piece(100, 50, False), piece(200, 50, True)], 0.2, seed=1)
    tokens = [set(np.concatenate([d.ids for d in part]).tolist()) for part in (train, held)]
    assert not tokens[0] & tokens[1] and len(tokens[0] | tokens[1]) == 150
    assert len(tokens[1]) == 30 or set(range(200, 250)) <= tokens[1]


# ---- a run ---------------------------------------------------------------------------------------

def lines(run: Path) -> list[dict[str, Any]]:
    """Of its log."""
    return [json.loads(line) for line in (run / folder.LOG).read_text().splitlines()]


def megatrain(*words: Any) -> int:
    return cli.main([str(w) for w in words])


@pytest.fixture(scope="module")
def whole_run(toy: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("runs")
    (where / "my.txt").write_text(TEXT[:6000])
    (where / "run.yaml").write_text(f"model: {toy}\ndata: {where / 'my.txt'}\nseq: 64\nlr: 9e-3\nsteps: 8\n"
                                    "tokens: 512\nmicro: 2\nsave_every: 50\nvalidation: 0.1\n")
    assert megatrain("train", "--config", where / "run.yaml", "--out", where / "whole", "--lr", "3e-3") == 0
    return where


def test_a_run_learns_and_says_what_bound_it(whole_run: Path) -> None:
    found = lines(whole_run / "whole")
    steps = [line for line in found if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.2
    assert all(line["grad_norm"] > 0 and line["tokens_per_second"] > 0 for line in steps) and steps[-1]["bound"]
    assert [line["step"] for line in found if "eval_loss" in line] == list(range(1, 9))
    assert folder.settings_of(whole_run / "whole").lr == 3e-3, "flags come before the file"


def test_the_bar_tells_how_far_a_step_is_that_takes_long(monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    from megatrain_torch.commands import loop
    from megatrain_torch.reports.api import Progress
    monkeypatch.setenv("FORCE_COLOR", "1")               # rich takes that for a terminal
    monkeypatch.delenv("NO_COLOR", raising=False)
    now = [0.0]
    monkeypatch.setattr(loop, "monotonic", lambda: now[0])
    bar = loop.Bar(print, types.SimpleNamespace(progress=lambda: Progress(31, 7, 31)))
    state = types.SimpleNamespace(max_steps=3, global_step=1)
    now[0] = 100.0
    bar.on_step_begin(None, state, None)
    bar.on_train_begin(None, state, None)
    bar.on_train_end(None, state, None)
    assert "step 1/3" in (said := capsys.readouterr().out) and "backward" not in said
    now[0] = 106.0
    bar.on_train_begin(None, state, None)
    bar.on_save(None, state, None)
    bar.on_train_end(None, state, None)
    assert "backward 7/31" in (said := capsys.readouterr().out) and "step 1: checkpoint-1\n" in said


def test_a_run_that_was_told_to_stop_resumes_to_the_same_bits(
        whole_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from megatrain_torch.commands import loop
    from megatrain_torch.commands.folder import UNFINISHED
    from megatrain_torch.commands.loop import Streamed
    half, log, finish = whole_run / "half", Streamed.log, Streamed.finish_saving
    clip_next, limits = mt.AdamW.clip_next, []

    def stop_in_step_3(self: Any, logs: dict[str, Any], *args: Any) -> None:
        log(self, logs, *args)
        if "loss" in logs and self.state.global_step == 3:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(Streamed, "log", stop_in_step_3)
        patched.setattr(mt.AdamW, "clip_next", lambda opt, limit: limits.append(limit) or clip_next(opt, limit))
        assert megatrain("train", "--config", whole_run / "run.yaml", "--out", half, "--lr", "3e-3") == 143
    assert "megatrain resume" in capsys.readouterr().out
    folder.Owned(half).begin("checkpoint-9")
    (half / "checkpoint-9").mkdir()                      # as kill -9 leaves one without Trainer's files
    (half / "checkpoint-9.tmp-1-0").mkdir()              # and while one is written
    (half / UNFINISHED / "checkpoint-9").mkdir(parents=True)
    stopped = folder.last_checkpoint(half).name
    assert stopped in ("checkpoint-3", "checkpoint-4") and not (half / "model").exists()
    assert limits == [1.0] * int(stopped[-1]), "the optimizer clips, once a step"
    with (half / folder.LOG).open("a") as log_file:      # steps that were made and not saved
        log_file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    write_yaml(half / folder.CONFIG, folder.settings_of(half).with_(keep=1))
    whole, clock = [], itertools.count()

    def finish_and_look(trainer: Any) -> None:
        finish(trainer)
        whole.append([p.name for p in folder.checkpoints(half)])

    monkeypatch.setattr(Streamed, "finish_saving", finish_and_look)
    monkeypatch.setattr(loop, "time", types.SimpleNamespace(perf_counter=lambda: float(next(clock))))
    assert megatrain("resume", half) == 0
    assert "checkpoint-9 was being written" in capsys.readouterr().out
    assert all(whole), "there is a whole one at any time"
    assert [p.name for p in half.glob("checkpoint-*")] == whole[-1] == ["checkpoint-8"]
    rates = [line["tokens_per_second"] for line in lines(half) if line["step"] > int(stopped[-1]) and "loss" in line]
    assert rates and set(rates) == {512.0}, "steps of this process alone, a second each"
    assert sum(line["step"] == 5 and "loss" in line for line in lines(half)) == 1
    files = [(whole_run / run / "model/model.safetensors").read_bytes() for run in ("whole", "half")]
    assert files[0] == files[1]
    losses = [{line["step"]: line["loss"] for line in lines(whole_run / run) if "loss" in line} for run in ("whole", "half")]
    assert losses[0] == losses[1]


def test_what_a_run_made_is_exported_and_read_by_transformers(whole_run: Path, toy: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    to = whole_run / "exported"
    assert megatrain("export", whole_run / "whole", to) == 0
    model = AutoModelForCausalLM.from_pretrained(to, dtype="auto")
    trained = AutoModelForCausalLM.from_pretrained(whole_run / "whole/model")
    begin = AutoModelForCausalLM.from_pretrained(toy)
    assert model.dtype == torch.float32 and len(AutoTokenizer.from_pretrained(to)) == 257
    weights = [m.lm_head.weight for m in (model, trained, begin)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    assert megatrain("export", whole_run / "whole/checkpoint-8", whole_run / "of a step") == 0
    assert {p.name for p in (whole_run / "of a step").iterdir()} == {p.name for p in to.iterdir()}


def test_a_run_generates_and_is_evaluated(whole_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert megatrain("generate", whole_run / "whole", "--prompt", "ROMEO:", "--max-new-tokens", 5) == 0
    assert capsys.readouterr().out.startswith("ROMEO:")
    assert megatrain("eval", whole_run / "whole", whole_run / "my.txt") == 0
    said = capsys.readouterr().out
    last = [line["loss"] for line in lines(whole_run / "whole") if "loss" in line][-1]
    assert abs(float(said.split()[1]) - last) < 0.5 and "rows of 64" in said
    pairs = whole_run / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": "a" * n, "completion": "b"}) + "\n" for n in (70, 70, 5)))
    assert megatrain("eval", whole_run / "whole", pairs) == 0
    said = capsys.readouterr().out
    assert said.startswith("2 conversations are longer than 64 tokens") and "; 2 tokens in" in said
    said = refused(capsys, "eval", whole_run / "whole", pairs, "--seq", 5)
    assert "in rows of 5 (--seq), none is to be learned; the longest prompt with its completion has 72" in said


def refused(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    assert megatrain(*words) == 1
    return capsys.readouterr().err


def test_a_checkpoint_that_was_cut_short_is_named_with_the_one_before(whole_run: Path, tmp_path: Path,
                                                                     capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_run / "whole", run, ignore=shutil.ignore_patterns("model"))
    log = (run / "log.jsonl").read_text()
    folder.Owned(run).begin("checkpoint-9")
    shutil.copytree(run / "checkpoint-8", run / "checkpoint-9")
    state = json.loads((run / "checkpoint-9" / folder.WHOLE).read_text())
    (run / "checkpoint-9" / folder.WHOLE).write_text(json.dumps(state | {"global_step": 9}))
    os.truncate(run / "checkpoint-9/states.safetensors", 100)
    said = refused(capsys, "resume", run)
    assert "checkpoint-9/states.safetensors has 100 bytes, and" in said
    assert f"remove {run}/checkpoint-9, and megatrain resume {run} goes on from checkpoint-8" in said
    shutil.rmtree(run / "checkpoint-8")
    assert f"there is none before it; megatrain train --out {run} --overwrite begins" in refused(capsys, "resume", run)
    assert (run / "log.jsonl").read_text() == log, "nothing is changed"


@pytest.mark.parametrize("changes, before, now", [
    ({"states": "8bit"}, "states: fp32, dtype: float32", "states: 8bit, dtype: float32"),
    ({"states": "8bit-sr", "dtype": "bfloat16"}, "states: fp32, dtype: float32", "states: 8bit-sr, dtype: bfloat16"),
], ids=["states", "states and dtype"])
def test_states_that_hold_less_than_the_checkpoints_are_refused_or_rounded_when_told(
        whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], before: str,
        now: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_run / "whole", run, ignore=shutil.ignore_patterns("model"))
    begun = folder.settings_of(run).with_(out=str(run), steps=9)
    folder.Owned(run).begin("checkpoint-9")
    (run / "checkpoint-9.tmp-1-0").mkdir()
    write_yaml(run / folder.CONFIG, begun.with_(**changes))
    assert refused(capsys, "resume", run) == (
        f"megatrain: {run}/config.yaml says {now} now, and checkpoint-8 was written with {before}, which holds more: "
        f"put that back there to go on to the same bits, or megatrain resume {run} --convert rounds\n")
    assert (run / "checkpoint-9.tmp-1-0").exists(), "nothing is changed"
    assert megatrain("resume", run, "--convert") == 0
    assert manifest.read(run / "checkpoint-9")["states"] == changes["states"]
    shutil.rmtree(run / "model")
    write_yaml(run / folder.CONFIG, begun.with_(steps=10))
    assert megatrain("resume", run) == 0, "states that hold more need no word"
    assert manifest.read(run / "checkpoint-10")["states"] == "fp32"


def test_documents_that_would_see_each_other_get_rows_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_opt().eval()
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)     # so that what is seen matters
    model.save_pretrained(tmp_path / "opt")
    bytes_tokenizer().save_pretrained(tmp_path / "opt")
    pairs = [{"prompt": TEXT[i:i + 10], "completion": TEXT[i + 10:i + 20 + i % 7]} for i in range(0, 300, 30)]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    these = (tmp_path / "opt", tmp_path / "my.jsonl", "--seq", 64)
    losses, targets = 0.0, 0
    for document in data.documents(pairs, bytes_tokenizer()):
        ids = torch.from_numpy(document.ids.astype(np.int64))
        labels = ids.masked_fill(~torch.from_numpy(document.trained), data.IGNORED)
        with torch.no_grad():
            losses += model(ids[None], labels=labels[None]).loss.item() * int(document.trained.sum())
        targets += int(document.trained.sum())
    said = ("documents in one row of a model of kind opt may see each other, so each has rows of its own, filled up at "
            "the end: 10 rows")
    assert megatrain("eval", *these) == 0
    out = capsys.readouterr().out
    assert said in out
    assert f"loss {losses / targets:.3f}" in out
    assert megatrain("train", *these, "--out", tmp_path / "run", "--steps", 1, "--tokens", 640, "--validation", 0) == 0
    assert said in capsys.readouterr().out
    assert lines(tmp_path / "run")[0]["loss"] == pytest.approx(losses / targets, rel=1e-4)
    write_yaml(tmp_path / "run/config.yaml", folder.settings_of(tmp_path / "run").with_(steps=2))
    shutil.rmtree(tmp_path / "run/model")
    assert megatrain("resume", tmp_path / "run") == 0, "a step may be more than the packed data has"


def test_prompts_that_fill_their_rows_are_told_as_that(toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.jsonl").write_text(json.dumps({"prompt": "a" * 70, "completion": "b"}) + "\n")
    said = "of 72 tokens, in rows of 64 (--seq), none is to be learned; the longest prompt with its completion has 72"
    for words in (("train", "--out", tmp_path / "run", "--validation", 0), ("eval",)):
        assert said in refused(capsys, words[0], toy, tmp_path / "my.jsonl", "--seq", 64, *words[1:])


def test_words_of_refusals_say_what_to_do(whole_run: Path, toy: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, run = whole_run / "my.txt", whole_run / "whole"
    (whole_run / "torn.yaml").write_text("model: a\n  lr: 3\n")
    (whole_run / "bytes.yaml").write_bytes(b"\xff")
    (whole_run / "list.json").write_text("[]")
    for words, said in [
        (("train",), "which model? megatrain train MODEL DATA"),
        (("train", toy, text, "--out", run), "--overwrite removes it"),
        (("train", toy, "./nothing.txt"), "no such file"),
        (("train", toy, whole_run / "mine.txt"), f"no such file; did you mean {text}?"),
        (("train", "./nothing", text), "no such folder"),
        (("train", whole_run / "whola", text), f"no such folder; did you mean {run}?"),
        (("train", toy, text, "--out", "/proc/n"), "out=/proc/n: nothing can be written there (No such file or directory)"),
        (("train", toy, text, "--out", "/proc"), "out=/proc: nothing can be written there"),
        (("train", toy, text, "--gpus", 9999), "gpus=9999: there are"),
        (("train", toy, text, "--chat-template", whole_run / "none"), "No such file or directory"),
        (("train", toy, text, "--out", toy), f"out={toy} is a model's folder, and stays as it is"),
        (("train", toy, text, "--nvme", "/nothing"), "nvme=/nothing: there is no such directory"),
        (("train", text, toy), "my.txt is a file: a model is a folder"),
        (("train", whole_run, text), "has no config.json"),
        (("train", toy, text, "--out", whole_run / "n", "--tokens", 64000, "--seq", 64), "all in one step"),
        (("train", toy, text, "--out", whole_run / "n", "--seq", 256), "at most; --seq 128 or less"),
        (("train", toy, text, "--out", whole_run / "n", "--micro", 3, "--tokens", 256), "equal parts; 1, 2 can"),
        (("train", toy, text, "--report-to", "wandb"), "is not installed: pip install wandb"),
        (("train", "--config", whole_run / "no.yaml"), "No such file"),
        (("train", "--config", whole_run / "torn.yaml"), "torn.yaml: not YAML: mapping values are not allowed here"),
        (("train", "--config", whole_run / "bytes.yaml"), "bytes.yaml: not YAML: "),
        (("resume", run), f"is finished: its model is {run / 'model'}; megatrain train {run} DATA"),
        (("resume", toy), "is no run"),
        (("resume", whole_run / "whola"), f"no such folder; did you mean {run}?"),
        (("export", run / "checkpoint-3", whole_run / "e"), "checkpoint-3: there is no such folder; did you mean"),
        (("export", run, run), "is there already; name a folder that is not"),
        (("export", run, "/proc/a/b"), "to=/proc/a: nothing can be written there"),
        (("generate", run, "--prompt", "a", "--chat"), "no chat template; without --chat"),
        (("generate", run, "--prompt", "a", "--max-new-tokens", 0), "max_new_tokens=0: at least 1"),
        (("generate", run, "--prompt", "a", "--max-new-tokens", 128), "128 positions at most; --max-new-tokens 127"),
        (("generate", run, "--prompt", "a" * 128), "128 positions at most; give a shorter prompt"),
        (("generate", run, "--prompt", "a", "--temperature", -1), "temperature=-1.0: 0 or more is needed"),
        (("generate", run, "--prompt", "a", "--top-p", 7), "top_p=7.0: a share is needed"),
        (("generate", run, "--prompt", "a", "--device", "cuda"), "device=cuda: torch sees no CUDA device"),
        (("doctor", "--device", "cuda"), "--device cuda: torch sees no CUDA device"),
        (("doctor", "--out", "/proc/n/m.json"), "--out /proc/n: nothing can be written there"),
        (("plan", run, "--tokens", 64, "--seq", 64, "--machine", whole_run / "list.json"), "list.json: not a machine"),
    ]:
        if ("wandb" in words and importlib.util.find_spec("wandb")) or ("cuda" in words and torch.cuda.is_available()):
            continue
        assert said in refused(capsys, *words), words
    assert not (whole_run / "n/config.yaml").exists(), "nothing is begun that is refused"


def test_a_model_whose_files_do_not_fit_is_named(toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file
    (tmp_path / "my.txt").write_text(TEXT[:500])

    def spoilt(name: str) -> Path:
        return Path(shutil.copytree(toy, tmp_path / name))

    for path in spoilt("untold").glob("tokenizer*"):
        path.unlink()
    (spoilt("torn_words") / "tokenizer.json").write_text('{"a":')
    os.truncate(spoilt("torn") / "model.safetensors", 5000)
    weights = load_file(spoilt("less") / "model.safetensors")
    save_file({k: w for k, w in weights.items() if "norm" not in k}, tmp_path / "less/model.safetensors", {"format": "pt"})
    config = json.loads((spoilt("wider") / "config.json").read_text())
    (tmp_path / "wider/config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    for name, said in [
        ("untold", "untold has no tokenizer (tokenizer.json): copy"),
        ("torn_words", "torn_words/tokenizer.json is damaged or cut short: copy it again"),
        ("torn", "torn/model.safetensors is damaged or cut short: copy it again"),
        ("less", "its files have no model.layers.0.input_layernorm.weight, and 4 more of the weights"),
        ("wider", "other shapes than config.json says"),
    ]:
        assert said in refused(capsys, "train", tmp_path / name, tmp_path / "my.txt", "--out", tmp_path / "out"), name
    assert not (tmp_path / "out").exists()
    why = ValueError("Unrecognized configuration class <class 'T5Config'> for this kind of AutoModel: ...\nModel ...")
    assert "it does not write one token after another" in models._words(why, Path(toy))


def test_what_the_disk_or_the_packages_do_not_allow_is_said_first(
        whole_run: Path, toy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    begin = ("train", toy, whole_run / "my.txt", "--out", tmp_path / "n", "--seq", 64, "--steps", 4)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=300_000))
        said = refused(capsys, *begin)
        assert "3 more checkpoints of 410.6 KiB and the model take 1.3 MiB, and 293.0 KiB are free" in said
        assert not (tmp_path / "n/config.yaml").exists()
        patched.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=100_000))
        assert "the model takes 136.9 KiB, and 97.7 KiB are free" in refused(capsys, "export", whole_run / "whole", tmp_path / "e")
        assert not (tmp_path / "e").exists()
    with monkeypatch.context() as patched:
        find = importlib.util.find_spec
        patched.setattr(importlib.util, "find_spec", lambda name: None if name in ("rich", "yaml") else find(name))
        assert "needs rich and yaml: pip install rich pyyaml" in refused(capsys, *begin)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "a/b")

    monkeypatch.setattr(models, "writable", full)
    assert refused(capsys, "export", whole_run / "whole", tmp_path / "b") == ("megatrain: a/b: No space left on device; make room there, or name "
                                                   "a folder on another disk\n")


def test_steps_that_changed_nothing_are_counted_at_the_end(whole_run: Path, toy: str, tmp_path: Path,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    assert megatrain("train", toy, whole_run / "my.txt", "--out", tmp_path / "run", "--lr", "1e30", "--steps", 2,
                     "--seq", 64, "--tokens", 64, "--validation", 0) == 0
    assert "1 steps had gradients that are not finite and changed nothing; a lower --lr than 1e+30" in (capsys.readouterr().out)


def test_a_run_of_conversations_is_talked_to_and_one_that_diverged_says_so(
        toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": TALK}) + "\n" for _ in range(20)))
    (tmp_path / "chat.jinja").write_text(MARKED)
    run = tmp_path / "run"
    assert megatrain("train", toy, "--out", run, tmp_path / "a.jsonl", "--chat-template", tmp_path / "chat.jinja", "--lr", 1,
                     "--seq", 64, "--tokens", 64, "--steps", 6) == 0, "DATA may stand behind a flag"
    said = capsys.readouterr().out
    assert f"megatrain generate {run} --chat --prompt" in said and "done" not in said
    assert "rose from" in said and "the run diverged" in said
    shown = []
    for words in ((), ("--chat",), ("--no-chat",)):
        assert megatrain("generate", run, "--prompt", "hi", "--max-new-tokens", 4, "--temperature", 0, *words) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2] and shown[2].startswith("hi"), "a run knows how it was trained"
    (tmp_path / "chat.jinja").write_text("{{ nothing.at.all }}")
    write_yaml(run / folder.CONFIG, folder.settings_of(run).with_(steps=7))
    shutil.rmtree(run / "model")
    assert megatrain("resume", run) == 0, "the template is the run's"


def test_what_is_only_asked_needs_room_for_weights_alone(toy: str, tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text(TEXT[:500])
    weights = sum(p.nbytes for p in toy_model().parameters())
    assert megatrain("eval", toy, tmp_path / "my.txt", "--host", f"{3 * weights // 1024}KiB") == 0
    assert megatrain("generate", toy, "--prompt", "a", "--max-new-tokens", 2, "--host", f"{3 * weights // 1024}KiB") == 0


def test_ctrl_c_while_the_package_is_imported_is_one_word() -> None:
    code = ("import builtins, os, signal, sys; sys.argv[0], real = 'bin/megatrain', builtins.__import__\n"
            "def seen(name, *a, **kw):\n"
            "    if name == 'torch': os.kill(os.getpid(), signal.SIGINT)\n"
            "    return real(name, *a, **kw)\n"
            "builtins.__import__ = seen\nimport megatrain_torch.cli")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (130, "megatrain: interrupted\n")


# ---- the hub, out of reach -----------------------------------------------------------------------

@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Hosts whose names were looked up, all in vain; and an empty cache of the hub in tmp_path."""
    from huggingface_hub import constants
    asked: list[str] = []

    def lookup(host: str, *_: Any, **__: Any) -> None:
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(time, "sleep", lambda _: None)            # between huggingface_hub's own tries
    models.hub_answers.cache_clear()
    yield asked
    models.hub_answers.cache_clear()


def test_a_name_that_is_nowhere_is_refused_after_one_request(unreachable: list[str], tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.txt").write_text(TEXT[:500])
    said = refused(capsys, "train", "no-such-model", tmp_path / "my.txt", "--out", tmp_path / "out")
    assert "no folder of this name here, so the hub was asked" in said and "cache" in said
    assert len(unreachable) == 1 and not (tmp_path / "out").exists()
    assert "Repo id must use" in refused(capsys, "plan", "no model", "--tokens", 64, "--seq", 64)


def test_a_model_in_the_hubs_cache_is_used_where_the_hub_does_not_answer(unreachable: list[str], toy: str, tmp_path: Path) -> None:
    from huggingface_hub import constants
    cached = tmp_path / "models--toys--toy"
    shutil.copytree(toy, cached / "snapshots/0123")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("0123")
    assert len(models.load_tokenizer("toys/toy")) == 257
    assert models.load_model("toys/toy", "float32").config.hidden_size == 32
    assert len(unreachable) == 1 and not constants.HF_HUB_OFFLINE, "the model at the end may be pushed"


def test_a_hub_that_answers_is_asked_by_name(unreachable: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it answers: that is transformers' to deal with."""
    from huggingface_hub import utils
    heads = []
    session = types.SimpleNamespace(head=lambda url, timeout: heads.append((url, timeout)) or "503")
    monkeypatch.setattr(utils, "get_session", lambda: session)
    assert models.hub_answers() and models.hub_answers()
    assert len(heads) == 1 and heads[0][1] > 0 and not unreachable
