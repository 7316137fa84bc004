"""Long texts in passages: the tokens of one call, in memory that grows by the tokens alone."""
from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
from test_cli import TEXT, bytes_tokenizer
from tokenizers import (
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from megatrain_torch import MegatrainError
from megatrain_torch.commands import data, mixture, reading, tokens, train
from megatrain_torch.commands.settings import Settings

LLAMA = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
         r"\s+(?!\S)|\s+")
STRANGE = "Ünïcode, e\u0301 and ﬁ — 日本語テキスト。 \U0001f600\u200d\U0001f468 \n \n\n\t x=1;\n\n\n\n   'tis 123456789\r\n"


def trained(model: Any, trainer: Any, pre: Any = None, norm: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if norm is not None:
        tokenizer.normalizer = norm
    tokenizer.train_from_iterator([TEXT[:30_000] + STRANGE * 20], trainer)
    return tokenizer


def bpe(pre: Any = None, norm: Any = None, **kw: Any) -> Tokenizer:
    letters = pre_tokenizers.ByteLevel.alphabet() if pre is not None else []
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=letters, show_progress=False,
                                  special_tokens=["<unk>", "<s>", "</s>"], **kw)
    return trained(models.BPE(unk_token="<unk>"), trainer, pre, norm)


def gpt2() -> Tokenizer:
    return bpe(pre_tokenizers.ByteLevel(add_prefix_space=True))


def llama3() -> Tokenizer:
    from tokenizers import Regex
    split = pre_tokenizers.Split(Regex(LLAMA), "isolated")
    return bpe(pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]))


def llama2() -> Tokenizer:
    """No words: a text is one, with its beginning marked."""
    mark = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = Tokenizer(models.BPE(unk_token="<unk>"))
    words.normalizer, words.pre_tokenizer = mark, pre_tokenizers.Split("▁", "merged_with_next")
    words.train_from_iterator([TEXT[:60_000]], trainers.BpeTrainer(vocab_size=700, show_progress=False,
                                                                   special_tokens=["<unk>", "<s>", "</s>"]))
    words.pre_tokenizer = None
    return words


def unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", show_progress=False,
                                      special_tokens=["<unk>", "<s>", "</s>"])
    return trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), normalizers.NFKC())


def wordpiece() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=600, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"])
    return trained(models.WordPiece(unk_token="<unk>"), trainer, pre_tokenizers.BertPreTokenizer(),
                   normalizers.BertNormalizer())


def fast(make: Callable[[], Tokenizer]) -> Any:
    tokenizer = make()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def text_of(kind: str) -> str:
    rng = random.Random(3)
    return {"prose": TEXT[100_000:140_000], "strange": STRANGE * 250,
            "one line": TEXT[:90_000].replace("\n", " "),
            "spaces": "".join(" " * 1500 + word + "\n" * 900 for word in TEXT[:300].split()),
            "no border": "".join(rng.choice("abcdefgh") for _ in range(80_000)),
            "runs": "".join(rng.choice("ab \n") * rng.randint(1, 30) for _ in range(6000))}[kind]


@pytest.mark.parametrize("make", [gpt2, llama3, llama2, unigram, wordpiece])
def test_a_text_in_pieces_has_the_tokens_of_one_call(make: Callable[[], Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = fast(make)
    monkeypatch.setattr(tokens, "PASSAGE", 1 << 12)                    # many of them
    monkeypatch.setattr(tokens, "LONG", 1 << 13)
    # Unigram's scores of two ways to cut a run of one character may be equal, and where a piece begins then decides.
    more = {llama2: ["spaces", "no border"], llama3: ["spaces", "no border"], unigram: []}.get(make, ["spaces"])
    for kind in ("prose", "strange", "one line", "runs", *more):
        text = text_of(kind)
        want = tokenizer(text, verbose=False)["input_ids"]
        found = tokens.ids_of(text, tokenizer)
        assert found.tolist() == want, kind
        assert found.dtype == np.uint16
        assert tokens.ids_of(text, tokenizer, special=False).tolist() == want[1:-1]


def test_pieces_that_agree_on_nothing_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = bytes_tokenizer()
    monkeypatch.setattr(tokens, "_agreed", lambda *_: None)
    text = TEXT[:150_000]
    assert tokenizer.decode(tokens.ids_of(text, tokenizer)) == text


def test_a_tokenizer_that_does_not_tell_places_is_given_paragraphs() -> None:
    inner, seen = bytes_tokenizer(), []

    class Slow:
        is_fast, eos_token_id = False, 256

        def __call__(self, text: Any, **kw: Any) -> Any:
            seen.extend([text] if isinstance(text, str) else text)
            return inner(text, **{k: v for k, v in kw.items() if k in ("add_special_tokens", "verbose")})

    text = TEXT[:200_000]
    assert inner.decode(tokens.ids_of(text, Slow())) == text
    assert max(map(len, seen)) <= 2 * tokens.PASSAGE and all(s.endswith("\n\n") for s in seen[2:-1])


def test_ids_that_two_bytes_do_not_hold_have_four() -> None:
    assert tokens.compact([65_535]).dtype == np.uint16 and tokens.compact([65_536]).dtype == np.uint32
    gathered = tokens._Gathered()
    gathered.add([1, 65_535])
    gathered.add([65_536])
    assert gathered.ids().tolist() == [1, 65_535, 65_536] and gathered.ids().dtype == np.uint32


def test_a_long_file_has_the_tokens_of_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LONG_BYTES", 1000)
    monkeypatch.setattr(reading, "READ_BYTES", 777)                 # cuts letters of several bytes, and \r\n
    text = ("\ufeff" + STRANGE * 30 + "\r\nlast\r")
    (tmp_path / "a.txt").write_bytes(text.encode())
    [record] = data.records(str(tmp_path / "a.txt"))
    whole = (tmp_path / "a.txt").read_text(encoding="utf-8-sig")
    assert isinstance(record["text"], reading.TextFile) and "".join(record["text"]) == whole
    [one], [other] = (data.documents([{"text": t}], bytes_tokenizer()) for t in (record["text"], whole))
    assert one.ids.tolist() == other.ids.tolist() and one.ids[-1] == 256 and one.trained.all()
    (tmp_path / "b.txt").write_bytes(b"a" * 5000 + b"\xff")
    with pytest.raises(MegatrainError, match=r"b\.txt: byte 5000 is not UTF-8"):
        data.documents(data.records(str(tmp_path / "b.txt")), bytes_tokenizer())


def test_how_far_it_is_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(reading, "LONG_BYTES", 1000)
    monkeypatch.setattr(reading, "EVERY_S", {True: 0.0, False: 0.0})
    (tmp_path / "a.txt").write_text(TEXT[:200_000])
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n')
    data.documents(data.records(str(tmp_path)), bytes_tokenizer(), None, "d", reading.Meter(list(tmp_path.iterdir())))
    assert "tokens\n" in capsys.readouterr().err, "with a meter that reading is told of, the share too"
    meter = reading.Meter(list(tmp_path.iterdir()))
    data.documents(data.records(str(tmp_path), meter=meter), bytes_tokenizer(), None, "d", meter)
    assert "tokenizing: 100%, 200,002 tokens\n" in capsys.readouterr().err


def memory(line: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{line}:")[1].split()[0]) * 1024


def test_a_text_takes_at_most_ten_bytes_a_byte(tmp_path: Path) -> None:
    """From the file to the rows, with the tokenizer that makes most tokens: one of a byte each."""
    path, size, tokenizer = tmp_path / "big.txt", 3_000_000, bytes_tokenizer()
    path.write_text((TEXT * (size // len(TEXT) + 1))[:size])
    settings = Settings(data=(str(path),), seq=512)
    tokens.ids_of(TEXT[:200_000], tokenizer)                         # what a call takes, whatever the text's size
    try:
        Path("/proc/self/clear_refs").write_text("5")                # the peak begins again
    except OSError:
        pytest.skip("the peak of this process's memory cannot be asked for here")
    before = memory("VmRSS")
    found = mixture.sources(settings, settings.data, tokenizer)
    parts = data.held_out(mixture.mixed(found, 0), 0.02, 0)
    assert len(train._rows(settings, tokenizer, parts)[0]) > 5000
    assert memory("VmHWM") - before < 10 * size
