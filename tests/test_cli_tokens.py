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
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from megatrain_torch.commands import data
from megatrain_torch.commands.settings import Settings

LLAMA = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|" r"\s+(?!\S)|\s+")
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
    return trained(models.WordPiece(unk_token="<unk>"), trainer, pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer())


def fast(make: Callable[[], Tokenizer]) -> Any:
    tokenizer = make()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def text_of(kind: str) -> str:
    rng = random.Random(3)
    return {"prose": TEXT[100_000:140_000], "strange": STRANGE * 250,
            "one line": TEXT[:90_000].replace("\n", " "), "marks": " -- ".join(f"({word})" for word in TEXT[:40_000].split()),
            "no spaces": ("日本語テキスト" * 12 + "\n") * 600, "spaces": "".join(" " * 1500 + word + "\n" * 900 for word in TEXT[:300].split()),
            "no border": "".join(rng.choice("abcdefgh") for _ in range(80_000)),
            "runs": "".join(rng.choice("ab \n") * rng.randint(1, 30) for _ in range(6000))}[kind]


@pytest.mark.parametrize("make", [gpt2, llama3, llama2, unigram, wordpiece])
def test_a_text_in_pieces_has_the_tokens_of_one_call(make: Callable[[], Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = fast(make)
    monkeypatch.setattr(data, "PASSAGE", 1 << 12)                    # many of them
    for kind in ("prose", "strange", "one line", "marks", *["no spaces"] * (make is not gpt2)):   # it puts a space before lines too
        text = text_of(kind)
        found = data.ids_of(text, tokenizer)
        assert found.tolist() == tokenizer(text, verbose=False)["input_ids"], kind
        assert found.dtype == np.uint16


def test_pieces_have_all_of_a_text_and_no_call_has_much_of_it() -> None:
    inner, seen = bytes_tokenizer(), []

    class Slow:
        is_fast, bos_token_id, eos_token_id = False, None, 256

        def __call__(self, text: Any, **kw: Any) -> Any:
            seen.extend([text] if isinstance(text, str) else text)
            return inner(text, **{k: v for k, v in kw.items() if k in ("add_special_tokens", "verbose")})

    for text in (TEXT[:200_000], *map(text_of, ("runs", "spaces", "no border"))):
        assert inner.decode(data.ids_of(text, Slow())) == f"{text}<end>"
    assert max(map(len, seen)) <= 2 * data.PASSAGE + 1


def test_ids_that_two_bytes_do_not_hold_have_four() -> None:
    assert data.compact([65_535]).dtype == np.uint16 and data.compact([65_536]).dtype == np.uint32


@pytest.mark.parametrize("make", [gpt2, llama2])
def test_a_text_begins_and_ends_once_whatever_it_begins_with(make: Callable[[], Tokenizer]) -> None:
    tokenizer = fast(make)
    tokenizer.bos_token = "<s>"
    begin, end = tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
    texts = [{"text": "<s>hello</s>"}, {"text": "<s><s>hello"}, {"text": "hello"}, {"text": "<s>" + TEXT[:90_000] + "</s>"}]
    pairs = [{"prompt": "<s>hello ", "completion": "you</s>"}, {"prompt": "hello ", "completion": "you"},
             {"prompt": "", "completion": ""}]
    for document in data.documents(texts + pairs, tokenizer):
        ids = document.ids.tolist()
        assert (ids.count(begin), ids.count(end)) == (1, 1) and document.trained[-1]
        assert (ids[0], ids[-1]) == (begin, end)
        assert not document.whole or not document.trained[0]


@pytest.mark.parametrize("make", [gpt2, llama3, llama2, unigram])
@pytest.mark.parametrize("prompt, completion", [("Who is it?", " It is I."), ("Who is it? ", "It is I."), ("a", "b"),
                                                ("Q:\n", "\nA"), ("", "all of it"), ("none of it", "")])
def test_a_prompt_and_its_completion_have_the_tokens_of_the_text_of_both(make: Callable[[], Tokenizer], prompt: str,
                                                                         completion: str) -> None:
    tokenizer = fast(make)
    [found] = data.documents([{"prompt": prompt, "completion": completion}], tokenizer)
    assert found.ids.tolist() == tokenizer(prompt + completion)["input_ids"]
    assert not found.trained[0] and found.trained[-1]
    learned = int(found.trained.sum())
    assert found.trained[-learned:].all(), "one stretch, up to the end"
    places = tokenizer(prompt + completion, return_offsets_mapping=True)["offset_mapping"][-learned:-1]
    assert all(end > len(prompt) for _, end in places) and (not completion.strip() or places)


def memory(line: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{line}:")[1].split()[0]) * 1024


def test_a_text_takes_at_most_twelve_bytes_a_byte(tmp_path: Path) -> None:
    """From the file to the rows, with the tokenizer that makes most tokens: one of a byte each."""
    path, size, tokenizer = tmp_path / "big.txt", 3_000_000, bytes_tokenizer()
    path.write_text((TEXT * (size // len(TEXT) + 1))[:size])
    settings = Settings(data=(str(path),), seq=512)
    data.ids_of(TEXT[:200_000], tokenizer)                         # what a call takes, whatever the text's size
    try:
        Path("/proc/self/clear_refs").write_text("5")                # the peak begins again
    except OSError:
        pytest.skip("the peak of this process's memory cannot be asked for here")
    before = memory("VmRSS")
    parts = data.held_out(data.mixed(data.sources(settings, settings.data, tokenizer), 0), 0.02, 0)
    assert len(data.rows_of(settings, tokenizer, parts, LlamaConfig())[0]) > 5000
    assert memory("VmHWM") - before < 12 * size + 20_000_000, "20 MB: what calls of the tokenizer take"
