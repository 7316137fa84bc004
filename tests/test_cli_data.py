"""What records and tables are read as, several sources with weights, and what tells a run's data from other data."""
from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from test_cli import MARKED, TEXT, bytes_tokenizer, lines, megatrain, refused, threads, toy, trained_words  # noqa: F401

from megatrain_torch import MegatrainError
from megatrain_torch.commands import data, folder, records, train
from megatrain_torch.commands.folder import write_yaml
from megatrain_torch.commands.settings import Settings, read_yaml


def chatty() -> Any:
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = MARKED
    return tokenizer


def read(path: Path, content: str | bytes, tokenizer: Any = None, column: str | None = None) -> list[tuple[str, list[str]]]:
    """(all of it, what is trained) of each document of a file."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    tokenizer = tokenizer or bytes_tokenizer()
    found = data.documents(records.records(str(path)), tokenizer, column, path.name)
    return [(tokenizer.decode(d.ids), trained_words(d)) for d in found]


# ---- tables ----

@pytest.mark.parametrize("name, content", [
    ("a.csv", 'text\r\nhello\r\n"a, ""b""\r\nc"\r\n'), ("a.tsv", 'text\tid\nhello\t1\n"a, ""b""\nc"\t2\n'),
    ("a.CSV", '\ufeffid,Text\n1,hello\n2,"a, ""b""\nc"\n'), ("a.csv", 'id;text\n1;hello\n2;"a, ""b""\nc"\n')])
def test_a_row_of_a_table_is_a_record(tmp_path: Path, name: str, content: str) -> None:
    assert [text.replace("\r", "") for text, _ in read(tmp_path / name, content)] == ["hello<end>", 'a, "b"\nc<end>']


def test_a_table_of_questions_trains_the_answers_and_one_of_messages_what_the_assistant_says(tmp_path: Path) -> None:
    found = read(tmp_path / "a.csv", "Question,Answer\nWhat?,That.\n")
    assert found == [("Question: What?\nAnswer: That.<end>", [" That.<end>"])]
    talk = json.dumps([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}])
    quoted = talk.replace('"', '""')
    assert read(tmp_path / "b.csv", f'messages\n"{quoted}"\n', chatty())[0][1] == ["ho<end>"]
    assert read(tmp_path / "c.csv", "a,b\n1,x\n", column="b") == [("x<end>", ["x<end>"])]


@pytest.mark.parametrize("name, content, words", [
    ("a.csv", "a,b\n1,2,3\n", "a.csv:2: 3 fields, and 2 names in the first row"), ("a.csv", "a,b\n1\n", "a.csv:2: 1 fields"),
    ("a.csv", 'text\n"open\n', "a.csv:2: not a table: unexpected end"), ("a.csv", "a,a\n1,2\n", "two fields are called 'a'"),
    ("a.csv", "", "it is empty"), ("a.csv", b"text\ncaf\xe9\n", "it is not UTF-8: iconv"),
    ("a.csv", "once,upon\na,time\n", "record 1 has 'once', 'upon' and no messages, prompt or text"),
    ("a.csv", "messages\nhi\n", "a.csv:2: messages: not JSON"),
    ("a.jsonl", '{"text": ' + "[" * 100_000 + "\n", "a.jsonl:1: not JSON"),
    ("a.json", "[" * 100_000, "a.json: not JSON")], ids=str)
def test_a_table_that_is_none_is_named(tmp_path: Path, name: str, content: str | bytes, words: str) -> None:
    with pytest.raises(MegatrainError) as why:
        read(tmp_path / name, content)
    assert words in str(why.value)


@pytest.mark.parametrize("bad, words", [
    ({"text": "\ud800"}, "no text: 'utf-8' codec can't encode"), ({"prompt": "a", "completion": "\ud800"}, "no text"),
    ({"messages": [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "b"}]}, "no text"),
    ({"messages": [{"role": None, "content": "a"}, {"role": "assistant", "content": "b"}]}, "message 1: role is null")], ids=str)
def test_one_bad_record_does_not_end_a_run(tmp_path: Path, bad: dict[str, Any], words: str, capsys: Any) -> None:
    found = read(tmp_path / "a.jsonl", json.dumps(bad) + '\n{"text": "good"}\n', chatty())
    assert found == [("good<end>", ["good<end>"])] and words in capsys.readouterr().out


def test_files_by_another_name_are_what_they_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = '{"prompt": "a", "completion": "b"}\n'
    for name in ("a.jsonl", "a.JSONL", "a.ndjson", "a.json"):
        assert [trained for _, trained in read(tmp_path / name, line * 2)] == [["b<end>"]] * 2, name
    assert read(tmp_path / "b.jsonl", "\ufeff" + line) == [("ab<end>", ["b<end>"])]
    assert read(tmp_path / "b.jsonl", "\ufeff\n" + line) == [("ab<end>", ["b<end>"])]
    assert "left out" not in capsys.readouterr().out
    read(tmp_path / "a.txt", line)
    assert "a.txt is trained as it stands, as a text; if its lines are records, name it .jsonl" in capsys.readouterr().out


# ---- instructions and questions ----

def test_what_is_asked_of_a_preference_is_a_text() -> None:
    with pytest.raises(MegatrainError, match="a record: instruction is a list: a text is needed"):
        records.as_asked({"instruction": ["a"], "chosen": "b", "rejected": "c"}, "dpo", True, "a record")


ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}


@pytest.mark.parametrize("record, asked, answer", [
    (ALPACA, "Add.\n\n1 2", "3"), (ALPACA | {"text": "all of it"}, "Add.\n\n1 2", "3"),
    (ALPACA | {"input": ""}, "Add.", "3"), (ALPACA | {"input": None}, "Add.", "3"),
    ({"Instruction": "Add.", "Output": "3"}, "Add.", "3"),
    ({"instruction": "Who?", "context": "Ann did.", "response": "Ann", "category": "qa"}, "Who?\n\nAnn did.", "Ann"),
    ({"question": "Who?", "answer": "Ann"}, "Who?", "Ann"), ({"query": "Who?", "response": "Ann"}, "Who?", "Ann"),
    ({"question": "Who?", "context": "Ann did.", "answer": "Ann", "response": "no"}, "Who?\n\nAnn did.", "Ann"),
    ({"instruction": "Answer.", "question": "Who?", "answer": "Ann"}, "Answer.\n\nWho?", "Ann"),
    ({"input": "Who?", "output": "Ann"}, "Who?", "Ann")], ids=str)
def test_nothing_that_a_record_asks_is_lost(tmp_path: Path, record: dict[str, Any], asked: str, answer: str) -> None:
    [(text, trained)] = read(tmp_path / "a.jsonl", json.dumps(record), chatty())
    assert text == f"user: {asked}assistant: {answer}<end>" and trained == [f"{answer}<end>"]
    [(text, trained)] = read(tmp_path / "a.jsonl", json.dumps(record))
    assert all(part in text for part in asked.split("\n\n")) and [t.strip() for t in trained] == [f"{answer}<end>"]


def test_a_system_message_is_told_too(tmp_path: Path) -> None:
    record = {"system_prompt": "Be brief.", "question": "Who?", "response": "Ann"}
    [(text, trained)] = read(tmp_path / "a.jsonl", json.dumps(record), chatty())
    assert text.startswith("system: Be brief.user: Who?") and trained == ["Ann<end>"]
    [(text, _)] = read(tmp_path / "a.jsonl", json.dumps(record | {"history": []}))
    assert text == "Be brief.\n\nQuestion: Who?\nAnswer: Ann<end>"
    [(text, _)] = read(tmp_path / "a.jsonl", json.dumps(ALPACA))
    assert text.startswith("Below is an instruction that describes a task, paired with an input") and text.endswith(
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3<end>")


@pytest.mark.parametrize("record, words", [
    ({"prompt": "a", "completion": "b", "system": "c"}, "has 'system' beside prompt, which would not be learned"),
    ({"prompt": "a", "input": "x", "output": "b"}, "has 'input' beside prompt"),
    ({"instruction": "a", "output": 3}, "output is a int: a text is needed"),
    ({"instruction": "a", "output": None}, "output is null"), ({"instruction": "a"}, "no messages, prompt or text"),
    ({"question": ["a"], "answer": "b"}, "question is a list"), ({"question": 0, "answer": "b"}, "question is a int"),
    ({"instruction": "a", "input": [], "output": "b"}, "input is a list"),
    ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "has a history, which would not be")], ids=str)
def test_a_record_that_asks_what_cannot_be_told_is_refused(tmp_path: Path, record: dict[str, Any], words: str) -> None:
    for tokenizer in (bytes_tokenizer(), chatty()):
        with pytest.raises(MegatrainError) as why:
            read(tmp_path / "a.jsonl", json.dumps(record), tokenizer)
        assert words in str(why.value)


def test_a_text_beside_a_question_without_answer_is_trained(tmp_path: Path) -> None:
    assert read(tmp_path / "a.jsonl", '{"question": "a", "text": "b"}') == [("b<end>", ["b<end>"])]
    assert read(tmp_path / "a.jsonl", '{"prompt": "a", "response": "b"}') == [("ab<end>", ["b<end>"])]


# ---- several sources ----

def sources(tmp_path: Path, *sizes: int) -> list[Path]:
    paths = []
    for name, size in zip("abc", sizes):
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps({"text": name * 99}) + "\n" for _ in range(size)))
    return paths


def mixed(*words: str) -> dict[str, int]:
    found = data.mixed(data.sources(Settings(), tuple(words), bytes_tokenizer()), 0)
    text = "".join(bytes_tokenizer().decode(d.ids) for d in found)
    return {name: text.count(name) for name in "abc" if name in text.replace("<end>", "")}


def test_weights_are_shares_of_the_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = map(str, sources(tmp_path, 10, 100, 40))
    assert mixed(a, b) == {"a": 990, "b": 9900}
    found = mixed(f"{a}:0.25", f"{b}:0.5", f"{c}:0.25")
    assert found["a"] == 990 and abs(found["b"] - 1980) <= 1 and abs(found["c"] - 990) <= 1
    assert "b.jsonl: 2,000 of 10,000 tokens, 50% of the data" in capsys.readouterr().out
    assert mixed(f"{a}:1", f"{b}:3") == mixed(f"{a}:0.25", f"{b}:0.75")
    short, long = (data.Document(torch.zeros(n).numpy(), torch.ones(n).numpy() > 0, True) for n in (20, 4000))
    found = [data.Source(name, 1.0, [short] * n + [long] * (n > 60)) for name, n in (("a", 60), ("b", 299))]
    for seed in range(20):
        assert len(data.mixed(found, seed)) == 120, "a long conversation ends no share"


def test_a_path_may_have_colons(tmp_path: Path) -> None:
    (tmp_path / "a:0.5").write_text("a" * 9)
    (tmp_path / "b:c.txt").write_text("b" * 9)
    assert data.named(str(tmp_path / "a:0.5")) == (str(tmp_path / "a:0.5"), None)
    assert data.named(str(tmp_path / "a:0.5:2")) == (str(tmp_path / "a:0.5"), 2.0)
    assert data.named("b:c.txt") == ("b:c.txt", None)
    assert mixed(str(tmp_path / "a:0.5:1"), str(tmp_path / "b:c.txt:1")) == {"a": 9, "b": 9}


@pytest.mark.parametrize("words, said", [
    (["a:0", "b:1"], "data=a:0: a weight is a share of the tokens, more than 0"), (["a:-1", "b:1"], "more than 0"),
    (["a:nan", "b:1"], "more than 0"), (["a:inf", "b:1"], "more than 0"), (["a:0.5", "b"], "b has no weight, and others"),
    (["a:0.5"], "a share among several sources, and this is one alone")])
def test_weights_that_are_none_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(MegatrainError) as why:
        data.sources(Settings(), tuple(words), bytes_tokenizer())
    assert said in str(why.value)


def test_settings_take_several_files_and_a_validation_file(tmp_path: Path) -> None:
    one, several = Settings.of({"data": "a.txt"}, ""), Settings.of({"data": ["a.txt", "b.txt"], "validation": "c.txt"}, "")
    assert one.data == ("a.txt",) and several.data == ("a.txt", "b.txt") and several.validation == "c.txt"
    assert Settings.of({"validation": "0.1"}, "").validation == 0.1
    for settings in (one, several):
        write_yaml(tmp_path / "c.yaml", settings)
        assert Settings.of(read_yaml(tmp_path / "c.yaml"), "") == settings
    for value in (3, [], [3], "", ["a", ""], {}, True):
        with pytest.raises(MegatrainError, match="a word, or a list of words"):
            Settings.of({"data": value}, "")


# ---- in a run ----

@pytest.fixture(scope="module")
def begun(toy: str, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A run of two steps of three, whose data and validation are files of their own."""
    where = tmp_path_factory.mktemp("begun")
    (where / "my.txt").write_text(TEXT[:3000])
    (where / "other.jsonl").write_text(json.dumps({"instruction": TEXT[:40], "output": TEXT[40:90]}) + "\n")
    (where / "held.txt").write_text(TEXT[5000:5600])
    assert megatrain("train", toy, where / "my.txt", where / "other.jsonl", "--out", where / "run", "--seq", 64, "--tokens",
                     128, "--steps", 2, "--validation", where / "held.txt") == 0
    shutil.rmtree(where / "run/model")
    write_yaml(where / "run/config.yaml", folder.settings_of(where / "run").with_(steps=3))
    return where


def test_what_is_held_out_is_data_of_its_own(begun: Path) -> None:
    parts, identity = train.parts_of(folder.settings_of(begun / "run"), bytes_tokenizer())
    assert bytes_tokenizer().decode(parts[1][0].ids) == TEXT[5000:5600] + "<end>" and len(parts[0]) == 2
    assert "validation" not in identity and "source 1 of validation" in identity
    assert [line for line in lines(begun / "run") if "eval_loss" in line]


def test_resume_with_other_data_is_refused_or_told(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, whole = begun / "run", (begun / "my.txt").read_text()
    settings, log = folder.settings_of(run), (run / folder.LOG).read_bytes()
    changes = [("source 1 of data is 3,002 tokens of", {}, whole + "!"), ("source 1 of data is", {}, whole[:-1] + "~"),
               ("seq is 32 now, and was 64", {"seq": 32}, whole), ("seed is 1 now, and was 0", {"seed": 1}, whole),
               ("source 2 of data is None now", {"data": settings.data[:1]}, whole),
               ("source 1 of data is", {"data": settings.data[::-1]}, whole),
               ("validation is 0.1 now, and was None", {"validation": 0.1}, whole)]
    for words, change, text in changes:
        (begun / "my.txt").write_text(text)
        write_yaml(run / "config.yaml", dataclasses.replace(settings, **change))
        said = refused(capsys, "resume", run)
        assert words in said and f"megatrain resume {run} --new-data" in said, words
        assert (run / folder.LOG).read_bytes() == log and not (run / "model").exists(), "nothing is changed"
    (begun / "my.txt").rename(begun / "moved.txt")
    moved = (str(begun / "moved.txt"), settings.data[1])
    (begun / "moved.txt").write_text(whole + "!")
    write_yaml(run / "config.yaml", settings.with_(data=moved))
    assert megatrain("resume", run, "--new-data") == 0
    assert [line["step"] for line in lines(run) if "loss" in line] == [1, 2, 3]
    shutil.rmtree(run / "model")
    write_yaml(run / "config.yaml", settings.with_(data=moved, steps=4))
    assert megatrain("resume", run) == 0, "the same data by another name, and it is the run's now"
