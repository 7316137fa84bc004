"""`--lora` and `--base`: adapters beside a model that stays as it is, from the command line."""
from __future__ import annotations

import importlib.util
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from test_cli import TEXT, bytes_tokenizer, lines, megatrain, refused, threads  # noqa: F401
from torch import Tensor

import megatrain_torch as mt
from megatrain_torch import MegatrainError
from megatrain_torch.base.units import ALIGN
from megatrain_torch.commands import folder, models
from megatrain_torch.commands.folder import write_yaml
from megatrain_torch.commands.settings import Settings, as_words

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SHAPE = {"vocab_size": 257, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 4, "bos_token_id": None, "eos_token_id": 256,
         "max_position_embeddings": 128}
ASKED = "r=4,alpha=8,targets=all,dropout=0.1"
HAS_BNB = importlib.util.find_spec("bitsandbytes") is not None
BNB = pytest.mark.skipif(not HAS_BNB, reason="the extra `bases` has it; test_bases_apart.py")


# ---- what is asked for ---------------------------------------------------------------------------

@pytest.mark.parametrize("value, found", [
    ("r=16", "r=16,alpha=32,targets=all"),
    ("r=16,alpha=32,targets=all", "r=16,alpha=32,targets=all"),
    ("targets=q_proj,v_proj, r=8 ,alpha=8.5", "r=8,alpha=8.5,targets=q_proj,v_proj"),
    ({"r": 4, "targets": ["q_proj"], "dropout": "5e-2"}, "r=4,alpha=8,targets=q_proj,dropout=0.05"),
    ({"r": "4", "alpha": 8, "targets": "all"}, "r=4,alpha=8,targets=all"),
    ({"r": 4, "targets": "q_proj, v_proj"}, "r=4,alpha=8,targets=q_proj,v_proj"),
    ("r=4,dora=True,rslora=false", "r=4,alpha=8,targets=all,dora=true"),
    ({"r": 4, "rslora": True, "dora": False}, "r=4,alpha=8,targets=all,rslora=true"),
    ("r=4,alpha=1234567.25,dropout=0.12345678", "r=4,alpha=1234567.25,targets=all,dropout=0.12345678"),
], ids=str)
def test_adapters_are_asked_for_in_words_or_a_table(value: Any, found: str) -> None:
    assert Settings.of({"lora": value}, "here").lora == found == as_words(found)


@pytest.mark.parametrize("value, words", [
    ("r=0", "here: lora: r=0: at least 1 is needed"),
    ("r=-3", "r=-3: at least 1"),
    ("r=1.5", "lora: r='1.5': a whole number is needed"),
    ({"r": True}, "lora: r=True: a whole number"),
    ({"r": float("inf")}, "lora: r=inf: a whole number"),
    ("alpha=3", "r is needed, the adapters' rank"),
    ("", "r is needed"),
    ("rank=3", "lora: there is no 'rank'; did you mean 'r'?"),
    ("r=3,bias=all", "lora: there is no 'bias'; known: r, alpha, targets, dropout"),
    ("r=3,alpha=0", "alpha=0.0: more than 0"),
    ("r=3,alpha=inf", "alpha='inf': a number is needed"),
    ("r=3,dropout=1", "dropout=1.0: a number from 0 to 0.999 is needed"),
    ("r=3,dropout=nan", "dropout='nan': a number is needed"),
    ("r=3,targets=", "lora: targets='': all, or names"),
    ("r=3,targets=all,q_proj", "targets=all,q_proj: all has the others in it"),
    ({"r": 3, "targets": [1]}, "targets=[1]: all, or names"),
    ("q_proj", "words such as r=16,alpha=32,targets=all are needed"),
    ("r=3,dora=yes", "dora='yes': true or false is needed"),
    (16, "lora=16: words such as"),
], ids=str)
def test_adapters_that_make_no_sense_are_refused(value: Any, words: str) -> None:
    with pytest.raises(MegatrainError) as why:
        Settings.of({"lora": value}, "here")
    assert words in str(why.value)


def test_a_base_of_codes_needs_adapters_and_a_name_that_is_one() -> None:
    with pytest.raises(MegatrainError, match="base=nf4: codes are frozen; say what trains beside them, as lora=r"):
        Settings.of({"base": "nf4"}, "here")
    with pytest.raises(MegatrainError, match="use one of none, nf4, int8, fp8, mxfp4"):
        Settings.of({"base": "int4", "lora": "r=1"}, "here")


# ---- a run ---------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("toy")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).bfloat16().save_pretrained(where)
    bytes_tokenizer().save_pretrained(where)
    (where / "my.txt").write_text(TEXT[:4000])
    return where


Batches = list[tuple[dict[str, Tensor], Any, Tensor]]


def trained(toy: Path, out: Path, base: str, asked: str = ASKED) -> Batches:
    """Runs it; of each micro-batch what it was, the tokens of its step, and the random state before it."""
    from megatrain_torch.commands.loop import OfRows
    seen: Batches = []
    own = OfRows.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
        seen.append((dict(inputs), kw.get("num_items_in_batch"), torch.get_rng_state()))
        return own(self, model, inputs, *args, **kw)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OfRows, "compute_loss", compute_loss)
        assert megatrain("train", toy, toy / "my.txt", "--out", out, "--lora", asked, "--base", base, "--steps", 4, "--seq",
                         64, "--tokens", 256, "--micro", 2, "--save-every", 2, "--lr", "1e-2", "--schedule",
                         "constant_with_warmup", "--warmup", 0, "--clip", 0.5, "--eval-every", 4, "--dtype", "bfloat16") == 0
    return seen


def losses_of(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(run) if "loss" in line}


def in_python(toy: Path, base: str, batches: Batches, **lora: Any) -> list[float]:
    """The same by a loop of one's own."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **lora or {"lora_dropout": 0.1})
    torch.manual_seed(0)
    model = mt.from_pretrained(transformers.AutoModelForCausalLM, toy, device="cpu", adapter=config,
                               base=None if base == "none" else base).train()
    opt = mt.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0,
                   max_grad_norm=0.5)
    losses = []
    for step in range(4):
        loss = 0.0
        for inputs, many, random in batches[2 * step:2 * step + 2]:
            torch.set_rng_state(random)      # of dropout
            part = model(**inputs, use_cache=False, num_items_in_batch=many).loss
            part.backward()
            loss += part.detach()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.fixture(scope="module")
def run(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Batches]:
    out = tmp_path_factory.mktemp("runs") / "fp8"
    return out, trained(toy, out, "fp8")


def test_a_run_of_adapters_over_codes_has_the_losses_of_a_loop_of_ones_own(run: tuple[Path, Batches], toy: Path) -> None:
    out, batches = run
    losses = losses_of(out)
    assert list(losses.values()) == in_python(toy, "fp8", batches) and losses[4] < losses[1] - 0.05
    config = folder.settings_of(out)
    assert (config.lora, config.base, config.dtype) == (ASKED, "fp8", "bfloat16")


@pytest.mark.parametrize("base", [pytest.param("nf4", marks=BNB), pytest.param("int8", marks=[BNB, parity.LONG]),
                                  pytest.param("none", marks=parity.LONG)])
def test_over_every_base_too(base: str, toy: Path, tmp_path: Path) -> None:
    batches = trained(toy, tmp_path / "run", base)
    assert list(losses_of(tmp_path / "run").values()) == in_python(toy, base, batches)


def test_dora_and_rank_stabilised_adapters_are_asked_for_by_name(toy: Path, tmp_path: Path,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    out, asked = tmp_path / "run", "r=4,alpha=8,targets=all,dora=true,rslora=true"
    batches = trained(toy, out, "none", asked)
    assert list(losses_of(out).values()) == in_python(toy, "none", batches, use_dora=True, use_rslora=True)
    again = stopped(out, tmp_path / "again")
    assert megatrain("resume", again) == 0 and losses_of(again) == losses_of(out)
    capsys.readouterr()
    assert megatrain("eval", out, toy / "my.txt") == 0 and megatrain("export", out, tmp_path / "whole", "--merged") == 0
    assert abs(float(capsys.readouterr().out.split()[1]) - losses_of(out)[4]) < 0.2


def test_a_stopped_run_goes_on_to_the_same_bits(run: tuple[Path, Batches], tmp_path: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    again = stopped(run[0], tmp_path / "again")
    settings = folder.settings_of(again)
    for change, words in [({"lora": "r=8,alpha=8,targets=all,dropout=0.1"},
                           f"says lora: r=8,alpha=8,targets=all,dropout=0.1 now, and checkpoint-2 was written "
                           f"with lora: {ASKED}: put that back"),
                          ({"base": "none"}, "says base: none now, and checkpoint-2 was written with base: fp8"),
                          ({"base": "none", "lora": None}, "says lora: None now, and checkpoint-2")]:
        write_yaml(again / folder.CONFIG, settings.with_(**change))
        assert words in refused(capsys, "resume", again)
    write_yaml(again / folder.CONFIG, settings)
    assert megatrain("resume", again) == 0
    assert losses_of(again) == losses_of(run[0])
    name = "model/adapter_model.safetensors"
    assert (again / name).read_bytes() == (run[0] / name).read_bytes()


def stopped(run: Path, at: Path) -> Path:
    """The run as it was behind its first checkpoint."""
    shutil.copytree(run, at)
    for name in ("model", "checkpoint-4"):
        shutil.rmtree(at / name)
    return at


def test_a_run_is_evaluated_written_with_and_exported(run: tuple[Path, Batches], toy: Path, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    out = run[0]
    assert megatrain("eval", out, toy / "my.txt", "--vram", "1GiB", "--host", "4GiB") == 0
    loss = float(capsys.readouterr().out.split()[1])
    assert abs(loss - losses_of(out)[4]) < 0.2
    said = []
    for more in ([], ["--vram", "1GiB", "--host", "4GiB"]):
        assert megatrain("generate", out, "--prompt", "ROMEO:", "--max-new-tokens", 3, "--temperature", 0, *more) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and said[0].startswith("ROMEO:")

    assert megatrain("export", out / "checkpoint-2", tmp_path / "earlier", "--merged") == 0
    assert "in bfloat16, read anew; it was trained over fp8 codes" in capsys.readouterr().out
    assert megatrain("eval", out / "checkpoint-4", toy / "my.txt") == 0, "over codes, in the run's rows"
    assert float(capsys.readouterr().out.split()[1]) == loss
    assert megatrain("export", out, tmp_path / "adapter") == 0
    assert f"goes over {toy}; --merged" in capsys.readouterr().out
    plain = transformers.AutoModelForCausalLM.from_pretrained(toy, dtype=torch.bfloat16)
    merged = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload()
    assert megatrain("export", out, tmp_path / "merged", "--merged") == 0
    assert f"the weights of {toy} in bfloat16, read anew; it was trained over fp8 codes" in capsys.readouterr().out
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert all(torch.equal(p, q) for p, q in zip(found.parameters(), merged.parameters(), strict=True))
    assert not hasattr(found.config, "quantization_config") and found.dtype == torch.bfloat16
    assert megatrain("eval", tmp_path / "merged", toy / "my.txt", "--seq", 64, "--dtype", "bfloat16") == 0
    assert abs(float(capsys.readouterr().out.split()[1]) - loss) < 0.02
    assert megatrain("eval", tmp_path / "adapter", toy / "my.txt", "--seq", 64) == 0, "an adapter by itself"
    assert abs(float(capsys.readouterr().out.split()[1]) - loss) < 0.02


def test_what_cannot_be_is_said_before_weights_are_read(run: tuple[Path, Batches], toy: Path, tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    out, text = run[0], toy / "my.txt"
    shutil.copytree(toy, tmp_path / "coded")
    config = json.loads((toy / "config.json").read_text())
    (tmp_path / "coded/config.json").write_text(json.dumps(config | {"quantization_config": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}}))
    begin = ("train", toy, text, "--out", tmp_path / "n", "--seq", 64)
    for words, said in [
        ((*begin, "--lora", "r=4,targets=q_prj"), "of the model's linear layers there is no 'q_prj'; did you mean 'q_proj'?"),
        ((*begin, "--lora", "r=4,targets=experts"), "known: down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj"),
        ((*begin, "--base", "nf4"), "base=nf4: codes are frozen"),
        ((*begin, "--base", "mxfp4", "--lora", "r=4"), f"--base mxfp4: {toy} is not; it is kept where a checkpoint has it"),
        (("train", tmp_path / "coded", *begin[2:], "--base", "mxfp4", "--lora", "r=4"),
         "is quantised already (fp8); --base fp8 keeps it as it is"),
        ((*begin, "--lora", "r=4", "--products", "fp8"), "has no layer for them: they are made in decoder layers"),
        (("train", out, *begin[2:]), f"is an adapter over {toy}: megatrain export {out} FOLDER --merged makes one"),
        (("plan", toy, "--machine", "rtx4090", "--base", "fp8"), "--base fp8: codes are frozen; say what trains beside them, as --lora r="),
        (("plan", toy, "--machine", "rtx4090", "--lora", "r=4,targets=x"), "targets=x: of the model's linear layers there is no 'x'"),
        ((*begin, "--lora", "r=4", "--base", "nf4"), "nf4 needs bitsandbytes: pip install bits"),
    ]:
        if "needs bitsandbytes" in said and HAS_BNB:
            continue
        assert said in refused(capsys, *words), words
    assert not (tmp_path / "n").exists(), "nothing is begun that is refused"


# ---- plans ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("base", [pytest.param("nf4", marks=BNB), pytest.param("int8", marks=BNB), "fp8"])
def test_a_model_without_weights_has_the_shape_of_what_is_read(base: str, toy: Path) -> None:
    from megatrain_torch.plans.shapes import shaped, shapes_of
    from megatrain_torch.store import bases
    read = bases.with_base(transformers.AutoModelForCausalLM, toy, base, None)
    alike = [shaped(transformers.AutoConfig.from_pretrained(toy), base)]
    with pytest.MonkeyPatch.context() as patched:            # nor does it need a package
        patched.setattr(bases.importlib.util, "find_spec", lambda name: None)
        alike.append(shaped(transformers.AutoConfig.from_pretrained(toy), base))
    shapes = [shapes_of(models.adapted(model, "r=4", 0))("fp32") for model in (read, *alike)]
    assert shapes[0] == shapes[1] == shapes[2]
    assert all(p.is_meta for model in alike for n, p in model.named_parameters() if "lora" not in n)
    linear = 3 * (4 * 128 * 128 + 3 * 128 * 256)
    assert shapes[0].parameters - shapes[0].trained == linear + 2 * 257 * 128 + 7 * 128


def test_a_plan_counts_codes_and_adapters(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("plan", toy, "--machine", "rtx4090", "--tokens", 1024, "--seq", 64, "--json", "--layers", 6)
    found = {}
    for name, more in (("all", ()), ("lora", ("--lora", "r=4")),
                       *((base, ("--lora", "r=4", "--base", base)) for base in ("fp8", "nf4", "int8"))):
        assert megatrain(*asked, *more) == 0
        found[name] = json.loads(capsys.readouterr().out)
    linear, rest = 6 * (4 * 128 * 128 + 3 * 128 * 256), 2 * 257 * 128 + 13 * 128
    adapters = 6 * 4 * (4 * 256 + 3 * 384)
    assert [found[n]["parameters"] for n in found] == [linear + rest, *[linear + rest + adapters] * 4]
    assert [found[n]["trained"] for n in found] == [linear + rest, *[adapters] * 4]
    weights = {n: sum(found[n]["weights"].values()) for n in found}
    assert weights["lora"] - weights["fp8"] == linear - 6 * 7 * ALIGN, "a byte for two, and scales"
    assert weights["nf4"] < weights["fp8"] < weights["int8"] + 6 * 7 * ALIGN < weights["lora"]


def test_a_plan_in_python_is_that_of_the_command_line(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.AutoConfig.from_pretrained(toy)
    asked = {"tokens": 1024, "seq": 64, "machine": "rtx4090", "layers": 6}
    flags = [word for name, value in asked.items() for word in (f"--{name}", value)]
    with torch.device("meta"):
        adapter = models.lora_config(transformers.AutoModelForCausalLM.from_config(config), "r=4")
    for base in (None, "fp8"):
        assert megatrain("plan", toy, *flags, "--lora", "r=4", "--json", *(("--base", base) if base else ())) == 0
        found, drawn = json.loads(capsys.readouterr().out), torch.get_rng_state()
        plan = mt.plan(config, **asked, base=base, adapter=adapter, use_cache=False)
        assert torch.equal(torch.get_rng_state(), drawn), "a plan draws no numbers"
        assert (plan.vram, plan.host, plan.weights, plan.trained) == tuple(found[n] for n in ("vram", "host", "weights", "trained"))
    with pytest.raises(mt.MegatrainError, match="base, adapter: of a config; a module is planned as it is"):
        mt.plan(torch.nn.Linear(4, 4), tokens=64, seq=64, machine="cpu", base="fp8")


def test_published_codes_are_counted_in_experts_too() -> None:
    from megatrain_torch.plans.shapes import shaped
    sizes = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}
    moe = transformers.Qwen3MoeConfig(**sizes, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2,
                                      quantization_config={"quant_method": "fp8"})
    oss = transformers.GptOssConfig(**sizes, intermediate_size=128, num_local_experts=4, head_dim=32,
                                    quantization_config={"quant_method": "mxfp4"})
    for config, base, bits in ((moe, "fp8", 8), (oss, "mxfp4", 4.25)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = shaped(config, base)
        experts = [p for n, p in model.named_parameters() if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]
        assert len(experts) == 2 and all(type(p).__name__ == "Coded" for p in experts)
        for p in experts:
            assert (p.codes.nbytes + p.scales.nbytes) * 8 == pytest.approx(bits * p.numel(), rel=1e-3)
