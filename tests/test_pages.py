"""Pages: their scripts run, links lead somewhere, messages that they explain are the package's, sentences are short."""
from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from situations import llama
from test_cli import bytes_tokenizer, toy_model

import megatrain_torch as mt

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
sys.path.append(str(ROOT / "tools"))
site = importlib.import_module("docs_site")
LONGEST = 25                # words of a sentence
# Pages for users and contributors, written by hand.
PLAIN = [README, ROOT / "examples/README.md", ROOT / "CONTRIBUTING.md", *(DOCS / f"{name}.md" for name in (
    "quick-start", "chats", "lora", "checkpoints", "troubleshooting", "cli", "plans", "low-precision", "numerics",
    "huggingface", "features", "install", "what-fits", "performance", "several-gpus"))]


def scripts(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def run(script: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(script, "page", "exec"), names)
    return names


def test_the_example_of_the_readme_trains(tmp_path: Path) -> None:
    toy_model().to(torch.bfloat16).save_pretrained(tmp_path)
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    names = {"path": str(tmp_path), "loader": [{"input_ids": ids, "labels": ids}] * 12}
    made = run(scripts(README)[0].replace("lr=1e-5", "lr=1e-2"), names)
    with torch.no_grad():
        last = made["model"](input_ids=ids, labels=ids).loss
    assert last < 4.5, f"after 12 steps on one batch the loss is {last:.2f}, from about 5.5"
    assert made["opt"].skipped_steps == 0


def test_the_quick_start_trains_and_its_checkpoint_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    toy_model().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    bytes_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "my.txt").write_text("To be, or not to be, that is the question. " * 30)
    script = scripts(DOCS / "quick-start.md")[0].replace('"Qwen/Qwen2.5-0.5B"', '"model"').replace("512", "64")
    made = run(script, {})
    assert made["opt"].grad_norm > 0 and made["opt"].skipped_steps == 0
    saved, loaded = scripts(DOCS / "checkpoints.md")
    run(saved, made)
    model = mt.stream(AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16))
    opt = mt.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=len(made["loader"]))
    again = run(loaded, {"mt": mt, "model": model, "opt": opt, "scheduler": scheduler})
    assert again["step"] == made["step"] and scheduler.last_epoch == made["scheduler"].last_epoch
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), made["model"].parameters(), strict=True))


def test_the_script_for_adapters_streams_them(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    llama().to(torch.bfloat16).save_pretrained(tmp_path)
    made = run(scripts(DOCS / "lora.md")[0], {"path": tmp_path})
    ids = torch.randint(32, (2, 8))
    made["model"](input_ids=ids, labels=ids).loss.backward()
    made["opt"].step()
    assert made["opt"].grad_norm > 0


# ---- links, and the site ----

def names() -> list[str]:
    """Of the site's pages."""
    return [*site.BESIDE, *sorted(page.name for page in DOCS.glob("*.md"))]


def file_of(name: str) -> Path:
    return ROOT / site.BESIDE.get(name, f"docs/{name}")


def links(text: str) -> list[str]:
    return re.findall(r"\]\((?!https?:)([^)\s]+)\)", text)


def anchors(page: Path) -> set[str]:
    return {site.anchor(head) for head in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)}


@pytest.mark.parametrize("name", names())
def test_links_of_a_page_lead_somewhere(name: str) -> None:
    page = file_of(name)
    for link in links(page.read_text()):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page} links to {link}, and there is no such heading"


@pytest.mark.parametrize("name", names())
def test_links_on_the_site_stay_on_it(name: str) -> None:
    """What is not on it is no link there."""
    for link in links(site.placed(file_of(name).read_text(), name)):
        file, _, anchor = link.partition("#")
        assert not file or file in names() or (DOCS / file).exists(), f"{name} on the site links to {link}"
        assert not anchor or anchor in anchors(file_of(file or name)), f"{name} on the site links to {link}"


def test_the_site_lists_every_page() -> None:
    assert sorted(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) == sorted(names())


# ---- what pages say of others ----

def test_the_readme_is_short() -> None:
    assert len(README.read_bytes()) <= 9 * 1024


def test_the_models_of_the_readme_are_those_that_fit() -> None:
    """Its table has rows of docs/what-fits.md, which mt.plan wrote."""
    known = (DOCS / "what-fits.md").read_text().splitlines()
    rows = re.findall(r"^\| [^|]+, \d+ GB \|.*", README.read_text(), re.MULTILINE)
    assert len(rows) >= 5
    assert [row for row in rows if row not in known] == []


def test_the_files_of_the_map_are_there() -> None:
    for row in re.findall(r"^\| `[^|]*\|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([^`]+)`", row):
            folder = name.rstrip("/").rpartition("/")[0] or folder
            assert any((ROOT / place / name).exists() for place in ("", folder)), f"CONTRIBUTING names {name}"


# ---- messages ----

def source() -> str:
    """All code, with what is written over several lines in one piece."""
    files = [*(ROOT / "megatrain_torch").rglob("*.py"), *(ROOT / "csrc").rglob("*.c")]
    return re.sub(r"\"\s*\n\s*f?\"", "", "\n".join(file.read_text() for file in files))


def test_messages_that_the_page_explains_are_the_packages() -> None:
    rows = re.findall(r"^\| (.*?) \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    messages = [words for row in rows for words in re.findall(r"`([^`]+)`", row) if "torch's" not in row]
    text = source()
    assert len(messages) > 40
    assert [m for m in messages if not all(piece in text for piece in m.split("..."))] == []


# ---- words ----

def sentences(text: str) -> list[str]:
    """Of prose: paragraphs and lists, without code, tables and headings; `code` is one word."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    found: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        if block.startswith(("|", "#", "    ")) or not block.strip():
            continue
        for item in re.split(r"\n(?=\s*(?:[-*]|\d+\.) )", block):
            words = re.sub(r"^\s*(?:[-*]|\d+\.) ", "", item)
            words = re.sub(r"`[^`]*`", "Code", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", words))
            found += re.split(r"(?<=[.!?])\*{0,2}\s+(?=\S)", " ".join(words.split()))
    return found


@pytest.mark.parametrize("page", PLAIN, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_of_a_page_are_short(page: Path) -> None:
    long = [s for s in sentences(page.read_text()) if len([w for w in s.split() if re.search(r"\w", w)]) > LONGEST]
    assert long == [], f"{len(long)} sentences of more than {LONGEST} words"
