"""tools/performance_page.py: figures are replaced, the text around them is not."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

spec = importlib.util.spec_from_file_location("performance_page", ROOT / "tools/performance_page.py")
page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(page)

CASE = "streamed 7b hidden=3584 20 layers 32768 tokens S=1024 micro=1 auto loss=hf clip=1 compute=auto plan=ram vram=24GiB"
STEP = {
    "bench": "step", "case": CASE, "median": 15234.4, "tflops": 525.71, "step_s": 2.1511, "over_gemm": 1.2345,
    "over_gemm_attention": 1.1, "over_bound": 1.03, "bound": "gpu", "vram_used_gib": 20.0,
    "host_bytes_per_parameter": 14.15, "bounds": {"gemm_s": 1.74},
    "trace": {"bound": "compute", "why": "bound by compute: busy 1.9 s of 2 s", "seconds": 2.0,
              "between_steps_s": 0.02, "busy_s": {"compute": 1.9, "h2d": 0.35}, "idle_s": {"host update": 0.1},
              "least_s": {"h2d": 0.345}},
}
TEXT = """before
<!-- figures: steps -->
old | table
<!-- end -->
between
<!-- figures: picture -->
<!-- end -->
<!-- figures: trace -->
<!-- end -->
<!-- figures: overhead -->
kept
<!-- end -->
after
"""


def test_figures_are_replaced_and_text_stays() -> None:
    text, kept = page.rewritten(TEXT, [STEP], True)
    assert "old | table" not in text
    assert ("| 7b, 20 layers, 32,768, 1024 | plan ram, 24GiB | **15,234** | 526 | 2.15 | 1.23 | 1.1 | 1.03 (gpu) | 20 "
            "| 14.2 |\n<!-- end -->\nbetween") in text
    assert "![Queues against time](step.png)" in text
    assert "Bound by compute: busy 1.9 s of 2 s." in text
    assert "| h2d | 0.35 | 18% | 0.345 |" in text
    assert "Between two steps: 0.02 s, 1.0% of the step." in text
    assert text.startswith("before\n") and text.endswith("kept\n<!-- end -->\nafter\n")
    assert kept == ["overhead"]
    assert page.rewritten(text, [STEP], True)[0] == text


def test_the_verbs_program_rewrites_the_page(tmp_path: Path) -> None:
    doc, results, png = tmp_path / "page.md", tmp_path / "results.jsonl", tmp_path / "any.png"
    doc.write_text(TEXT)
    results.write_text(json.dumps(STEP) + "\n")
    png.write_bytes(b"\x89PNG")
    command = [sys.executable, ROOT / "tools/performance_page.py", results, "--picture", png, "--page", doc]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert doc.read_text() == page.rewritten(TEXT, [STEP], True)[0]
    assert (tmp_path / "step.png").read_bytes() == b"\x89PNG"
    assert "overhead: nothing in the results" in done.stderr


def test_the_pages_figures_are_all_made_by_somebody() -> None:
    names = {match[2] for match in page.BLOCK.finditer(page.PAGE.read_text())}
    assert names == {*page.FIGURES, "picture"}
