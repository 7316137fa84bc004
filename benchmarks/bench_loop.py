"""README's training loop on a model of Qwen2.5's width with random weights: one configuration, one JSON line.

    python bench_loop.py --layers 20 --tokens 32768 --plan                  # plan=mt.plan(...)
    python bench_loop.py --layers 20 --tokens 32768                         # mt.stream(model) and nothing else
    python bench_loop.py --tokens 32768 --vram 24GiB [--plan]               # limits go to mt.plan, or to mt.stream
    python bench_loop.py --tokens 32768 --micro 2                           # the loop cuts a step in two
    python bench_loop.py --tokens 32768 --trainer                           # stock HF Trainer with mt.AdamW
    python bench_loop.py --tokens 32768 --hook 4                            # into one layer, before the fifth step
    PYTHONPATH=folder python bench_loop.py --tokens 32768                   # with the transformers that lies there
    python bench_loop.py --vary 4096 32768 --steps 200 [--by rows|seq]      # every step of another length
    python bench_loop.py --layers 6 --tokens 16384 --steps 3 --bits         # each step's norm, a sum of weights' bits
    python bench_loop.py --device cpu --width toy --layers 2 --tokens 256 --seq 64        # anywhere, in seconds

    torchrun --nproc-per-node 2 bench_loop.py --tokens 32768 --plan [--alone]       # a GPU each; tokens of each
    for n in 0 1; do torchrun --nnodes 2 --node-rank $n --nproc-per-node 1 --master-addr localhost \\
        --master-port 29500 bench_loop.py --tokens 32768 --plan & done; wait        # two GPUs as two machines

    python bench_loop.py --jobs FILE --out FILE.jsonl --seconds 500         # many, one after another
FILE: a line a run, "LABEL PACKAGE arguments"; PACKAGE: the folder that megatrain_torch lies in, "-" for what PYTHONPATH
has. Each run is a fork of a process that has imported torch and transformers and made the weights, but neither CUDA nor
megatrain_torch: a fresh process in all that is measured, without the 10 s that those take. A run begins only while
--seconds are not over, and is ended there. What runs print goes to FILE.jsonl.log. --python: new processes instead.

What counts: a step's seconds are those between the starts of two steps on the compute stream (CUDA events); nothing is
read back in between but with --bits (a norm each step) and --trainer (what Trainer reads). The last step ends where its
zero_grad was queued. median_s, tokens_s: from step --skip on (default 2: the third). peak_GiB: all that the driver
counts as used on the device, looked at every 20 ms. rss_GiB: the process's largest resident size, forked weights too.
Of several processes rank 0 prints the line: a step lasts as long as with the slowest, tokens_s is of all together,
peak_GiB and torch_peak_GiB are lists by rank. pss_GiB: host memory of all, shared pages once, where the model is
streamed and at the end; pss_load_GiB (--pss): the most while it is built and streamed, looked at four times a second,
which takes time there. --alone: rank 0 makes the same run by itself first; `gain` is tokens_s by its tokens_s.
"""
import argparse
import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

GIB = 2 ** 30
# hidden, intermediate, heads, kv heads, vocabulary
WIDTHS = {"toy": (64, 192, 4, 2, 512), "7b": (3584, 18944, 28, 4, 152064), "14b": (5120, 13824, 40, 8, 152064),
          "32b": (5120, 27648, 40, 8, 152064), "72b": (8192, 29568, 64, 8, 152064)}


def parser():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = ap.add_argument
    add("--label", default="")
    add("--device")
    add("--width", default="7b", choices=list(WIDTHS))
    add("--layers", type=int, default=20)
    add("--tokens", type=int, default=32768, help="in a step, of each process")
    add("--seq", type=int, default=1024)
    add("--micro", type=int, help="micro-batches of a step; default: the plan's, or 1")
    add("--steps", type=int, default=8)
    add("--skip", type=int, default=2, help="steps that are in no median")
    add("--plan", action="store_true", help="plan=mt.plan(model, tokens, seq, limits)")
    add("--told", action="store_true", help="mt.stream(model, tokens=, seq=), where it takes them")
    add("--by-hand", metavar="JSON", help='plan={...} by hand, as {"activations": "saved"}')
    add("--machine", help="for --plan; default: this one, or cpu")
    add("--delivery", choices=["whole", "shards"], help="for --plan, of several GPUs; default: the plan's choice")
    add("--vram")
    add("--host")
    add("--nvme")
    add("--states", default="fp32")
    add("--lora", type=int, default=0, metavar="R", help="PEFT's adapters on all products, the rest frozen")
    add("--products", help='"fp8": products of decoder layers')
    add("--compute", default="auto")
    add("--clip", type=float, default=1.0, help="0: not clipped")
    add("--dtype", default="bf16", choices=["bf16", "fp32"])
    add("--eval", action="store_true", help="model.eval() before mt.stream, as from_pretrained gives it")
    add("--generate", type=int, default=0, metavar="N", help="evaluates two batches and generates N tokens first")
    add("--hold", action="store_true", help="every step's loss is held")
    add("--bits", action="store_true")
    add("--hook", type=int, metavar="STEP", help="before it one layer gets a forward hook; peaks are from there")
    add("--vary", nargs=2, type=int, metavar=("LO", "HI"), help="tokens of a step, drawn evenly from here")
    add("--by", default="rows", choices=["rows", "seq"], help="what varies: sequences of --seq, or their length")
    add("--trainer", action="store_true")
    add("--batches", type=int, default=2, help="different ones, in turn")
    add("--explain", action="store_true", help="mt.explain's and mt.plan's texts too")
    add("--repeat", type=int, default=1, help="with --jobs: rounds over FILE; else runs, in new processes")
    add("--jobs", metavar="FILE")
    add("--out", default="loop.jsonl")
    add("--seconds", type=float, default=1e9)
    add("--python", action="store_true", help="with --jobs: a new interpreter a run, no forks")
    add("--alone", action="store_true", help="of several processes: one by itself first")
    add("--pss", action="store_true", help="host memory while the model is loaded is looked at")
    add("--dry", action="store_true", help="with --plan: what is planned, and no more")
    return ap


# ---- the model -----------------------------------------------------------------------------------

def filled(shape, dtype, std, seed):
    """Pseudo-random normal values at the speed of memory: a block of a prime length again and again."""
    import torch
    block = torch.empty(1_000_003).normal_(std=std, generator=torch.Generator().manual_seed(seed)).to(dtype)
    out = torch.empty(shape, dtype=dtype)
    flat = out.view(-1)
    whole = flat.numel() // block.numel() * block.numel()
    flat[:whole].view(-1, block.numel()).copy_(block)
    flat[whole:].copy_(block[: flat.numel() - whole])
    return out


def qwen(args):
    """The model's configuration, and the model on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config
    h, i, a, kv, v = WIDTHS[args.width]
    longest = max(args.seq, (args.vary or [0])[-1] if args.by == "seq" else 0, 64)
    config = Qwen2Config(hidden_size=h, intermediate_size=i, num_attention_heads=a, num_key_value_heads=kv,
                         vocab_size=v, num_hidden_layers=args.layers, max_position_embeddings=longest,
                         tie_word_embeddings=False)
    with torch.device("meta"):
        dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return config, model


def weights(args):
    """By name; on several threads, none of them torch's, so that a fork may follow."""
    import torch
    _, model = qwen(args)
    made = {}

    def make(seed, name, p):
        made[name] = (filled(p.shape, p.dtype, 0.02, seed) if p.dim() > 1
                      else torch.full(p.shape, 1.0 if name.endswith("weight") else 0.0, dtype=p.dtype))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(min(12, len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(lambda job: make(job[0], *job[1]), enumerate(model.named_parameters())))
    torch.set_num_threads(threads)
    return made


def adapted(args, model):
    if args.lora:
        import torch
        from peft import LoraConfig, get_peft_model
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=args.lora, target_modules="all-linear"))
    return model.eval() if args.eval else model.train()


def build(args, made):
    import torch
    config, model = qwen(args)
    if made is None:                     # the first process of several has the weights
        return adapted(args, model)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)        # its buffers are values
    for name, _ in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(made.pop(name)))
    return adapted(args, model)


def shape_of(args):
    """Runs of one shape may share their weights."""
    return args.width, args.layers, args.dtype


# ---- several processes ---------------------------------------------------------------------------

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "MASTER_ADDR",
            "MASTER_PORT")


def rank():
    return int(os.environ.get("RANK", 0))


def several():
    return int(os.environ.get("WORLD_SIZE", 1))


def joined(cuda):
    """The group of all that torchrun started. They may wait for what rank 0 does by itself."""
    import torch
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=20))


def by_itself(args):
    """What one process alone prints."""
    env = {k: v for k, v in os.environ.items() if k not in LAUNCHED and not k.startswith("TORCHELASTIC")}
    words = [w for w in args.words if w != "--alone"]
    env.pop("OMP_NUM_THREADS", None)     # torchrun's 1
    done = subprocess.run([sys.executable, os.path.abspath(__file__), *words], env=env, stdout=subprocess.PIPE,
                          check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def of_each(value):
    """By rank."""
    import torch
    if several() == 1:
        return [value]
    found = [None] * several()
    torch.distributed.all_gather_object(found, value)
    return found


def of_first(value):
    import torch
    held = [value]
    if several() > 1:
        torch.distributed.broadcast_object_list(held, 0)
    return held[0]


def pss():
    """Bytes of this process, of what it shares with others its part; 0 where the kernel does not say."""
    with contextlib.suppress(OSError):
        rows = dict(line.split(":", 1) for line in open("/proc/self/smaps_rollup") if ":" in line)
        return int(rows["Pss"].split()[0]) * 1024
    return 0


class Loading(threading.Thread):
    """(when, pss) while the model is made; only where it was asked for."""

    def __init__(self, asked):
        super().__init__(daemon=True)
        self.found, self.over = [], threading.Event()
        if asked:
            self.start()

    def run(self):
        while not self.over.wait(0.25):
            self.found.append((time.time(), pss()))


def most_together(each):
    """each: by rank, (when, bytes), at moments of its own. The most of all, by quarters of a second."""
    sums = {}
    for found in each:
        for when, most in {round(when * 4): n for when, n in found}.items():
            sums.setdefault(when, []).append(most)
    return max((sum(n) for n in sums.values() if len(n) == len(each)), default=0)


# ---- what is looked at ---------------------------------------------------------------------------

class Clock:
    def __init__(self, cuda, watch):
        self.cuda, self.watch, self.marks, self.wall = cuda, watch, [], []

    def mark(self):
        import torch
        self.wall.append(time.perf_counter())
        if self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()

    def seconds(self):
        import torch
        if not self.cuda:
            return [b - a for a, b in itertools.pairwise(self.wall)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(self.marks)]


class Watch(threading.Thread):
    """The most that is used of the device, by the driver's count."""

    def __init__(self, cuda):
        super().__init__(daemon=True)
        self.most, self.over, self.cuda = 0, threading.Event(), cuda
        if cuda:
            self.start()

    def begin(self):
        """From here on."""
        import torch
        self.most = 0
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def run(self):
        import torch
        while not self.over.wait(0.02):
            free, total = torch.cuda.mem_get_info()
            self.most = max(self.most, total - free)


def resident():
    """Largest so far, bytes."""
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024


def bits_of(model):
    """A sum of all weights' bits."""
    import torch
    total = 0
    for n, p in enumerate(model.parameters()):
        flat = p.detach().contiguous().view(-1).view(torch.int16 if p.element_size() == 2 else torch.int32)
        total += (2 * n + 1) * int(flat.sum(dtype=torch.int64))
    return f"{total & (2 ** 64 - 1):016x}"


def planned(plan):
    """What a plan says, and a name for its choice."""
    choice = [sorted(plan.homes.items()), sorted(plan.activations.items()), plan.slots, plan.micro, plan.states]
    return {"tokens_s": round(plan.tokens_per_second), "seconds": round(plan.seconds, 4), "micro": plan.micro,
            "vram_GiB": round(plan.vram_bytes / GIB, 2), "host_GiB": round(plan.host_bytes / GIB, 2),
            "disk_GiB": round(plan.disk_bytes / GIB, 2), "homes": dict(Counter(plan.homes.values())),
            "activations": dict(Counter(plan.activations.values())), "slots": plan.slots, "bound": plan.bound,
            "choice": hashlib.sha256(json.dumps(choice).encode()).hexdigest()[:10]}


def own_plan(model):
    """That of a loop which mt.stream plans itself, as it is in force; None: it has another, or none."""
    from megatrain_torch.model.runtime import runtime_of
    planning = runtime_of(model).planning
    return planned(planning.plan) if planning is not None and planning.plan is not None else None


def columns(text):
    """Of mt.explain's table: how many windows keep what, and run by whose code."""
    rows = [[c for c in line.split("  ") if c.strip()] for line in text.splitlines()]
    rows = [[c.strip() for c in row] for row in rows]
    head = next((r for r in rows if "activations" in r and "code" in r), None)
    if head is None:
        return {}
    at = {name: head.index(name) - len(head) for name in ("activations", "code")}
    return {name: dict(Counter(r[i] for r in rows if len(r) == len(head) and r is not head)) for name, i in at.items()}


# ---- one run -------------------------------------------------------------------------------------

def lengths(args):
    """Of each step's batch: rows and length."""
    if not args.vary:
        return [(args.tokens // args.seq, args.seq)] * args.steps
    draw, (lo, hi) = random.Random(0), args.vary
    if args.by == "rows":
        return [(draw.randint(max(1, lo // args.seq), hi // args.seq), args.seq) for _ in range(args.steps)]
    rows = max(1, hi // args.seq)
    return [(rows, draw.randint(max(2, lo // rows), hi // rows)) for _ in range(args.steps)]


def batches(args, dev):
    """ids of each step, on the device; few different ones."""
    import torch
    rng, made = torch.Generator().manual_seed(rank()), {}
    vocab = WIDTHS[args.width][-1]
    for i, shape in enumerate(lengths(args)):
        many = made.setdefault(shape, [])
        if len(many) < (1 if args.vary else args.batches):
            many.append(torch.randint(vocab, shape, generator=rng).to(dev))
        yield many[0 if args.vary else i % args.batches]


def begun(args, made, out, group=None):
    """The model streamed, and its optimizer. group: of this process alone, where several are there."""
    import torch

    import megatrain_torch as mt
    cuda = args.device != "cpu" and torch.cuda.is_available()
    model = build(args, made)
    kwargs = {k: getattr(args, k) for k in ("vram", "host", "nvme", "products") if getattr(args, k)}
    now = time.perf_counter()
    if args.plan:
        mates = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        more = {}
        if several() > 1 and group is None:
            more = {"gpus": mates, "machines": several() // mates, "delivery": args.delivery}
        plan = None if rank() else mt.plan(
            model, tokens=args.tokens, seq=args.seq, machine=args.machine or (None if cuda else "cpu"),
            micro=args.micro, states=args.states, compute=args.compute, **kwargs, **more)
        plan = of_first(plan) if group is None else plan
        out["planned"], args.micro = planned(plan), plan.micro
        out["plan_s"] = round(time.perf_counter() - now, 2)
        if args.explain:
            out["plan_text"] = str(plan)
        if args.dry:
            return None, None
        kwargs = {"plan": plan}
    elif args.by_hand:
        kwargs["plan"] = json.loads(args.by_hand)
    if args.told:
        kwargs |= {"tokens": args.tokens, "seq": args.seq}
    if args.compute != "auto":
        kwargs["compute"] = args.compute
    now = time.perf_counter()
    model = mt.stream(model, "cuda" if cuda else "cpu", group=group, **kwargs)
    out["stream_s"] = round(time.perf_counter() - now, 2)
    trained = [p for p in model.parameters() if p.requires_grad]
    opt = mt.AdamW(trained, lr=1e-5, weight_decay=0.1, max_grad_norm=args.clip or None, states=args.states)
    return model, opt


def looped(args, model, opt, clock, out):
    import torch
    micro, losses, norms, held = args.micro or 1, [], [], []
    for step, ids in enumerate(batches(args, model.device)):
        if step == args.hook:
            out["planned_before"] = own_plan(model)
            clock.watch.begin()
            model.model.layers[args.layers // 2].mlp.register_forward_hook(lambda *_: None)
        clock.mark()
        parts = []
        for part in ids.chunk(micro):
            loss = model(input_ids=part, labels=part).loss
            (loss / micro if micro > 1 else loss).backward()
            parts.append(loss.detach())
            held += [loss] * args.hold
        opt.step()
        if args.bits:
            norms.append(float(opt.grad_norm).hex())
        opt.zero_grad()
        losses.append(parts)
        if args.vary and len(losses) % 10 == 0:
            print(f"{len(losses)} steps, {time.perf_counter() - clock.wall[0]:.1f} s", file=sys.stderr, flush=True)
    clock.mark()
    out["seconds"] = [round(s, 4) for s in clock.seconds()]
    out["losses"] = [float(torch.stack(parts).float().mean()).hex() for parts in losses]
    out["norms"] = norms or [float(opt.grad_norm).hex()]


def by_trainer(args, model, opt, clock, out):
    """Stock Trainer, as docs/huggingface.md has it."""
    import tempfile

    import torch
    import transformers as tf
    micro = args.micro or 1
    ids = torch.cat([b.cpu() for b in batches(args, "cpu")])

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return len(ids)

        def __getitem__(self, i):
            return {"input_ids": ids[i], "labels": ids[i]}

    class Marks(tf.TrainerCallback):
        def on_step_begin(self, *_, **__):
            clock.mark()

    with tempfile.TemporaryDirectory() as folder:
        settings = tf.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=args.tokens // args.seq // micro, max_steps=args.steps,
            gradient_accumulation_steps=micro, max_grad_norm=args.clip or 0.0, save_strategy="no", report_to=[],
            disable_tqdm=True, logging_nan_inf_filter=False, use_cpu=model.device.type == "cpu", seed=3)
        found = tf.Trainer(model, settings, train_dataset=Rows(), callbacks=[Marks()], optimizers=(opt, None)).train()
    clock.mark()
    out["seconds"] = [round(s, 4) for s in clock.seconds()]
    out["losses"], out["norms"] = [float(found.training_loss).hex()], [float(opt.grad_norm).hex()]


def evaluated(args, model, out):
    """Batches without gradients, and `generate`, before any training."""
    import torch
    training = model.training
    model.eval()
    with torch.no_grad():
        two = itertools.islice(batches(args, model.device), 2)
        found = [float(model(input_ids=ids, labels=ids).loss) for ids in two]
    ids = next(iter(batches(args, model.device)))[:2, :16]
    new = model.generate(ids, max_new_tokens=args.generate, do_sample=False, use_cache=True)
    out["evaluated"] = {"losses": [f.hex() for f in found], "new": new[:, 16:].tolist()}
    model.train(training)


def run(args, made=None):
    """One line's fields."""
    born = time.perf_counter()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    import megatrain_torch as mt
    cuda = args.device != "cpu" and torch.cuda.is_available()
    if several() > 1:
        alone = by_itself(args) if args.alone and rank() == 0 else None
        joined(cuda)
        born = time.perf_counter()
    torch.manual_seed(0)
    out = {"label": args.label, "package": os.path.dirname(os.path.dirname(mt.__file__)),
           "arguments": args.words, "device": torch.cuda.get_device_name() if cuda else "cpu",
           "torch": torch.__version__, "transformers": transformers.__version__}
    loading = Loading(args.pss)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:        # of each machine
        made = made or weights(args)
    out["built_s"] = round(time.perf_counter() - born, 2)
    watch = Watch(cuda)
    clock = Clock(cuda, watch)
    model, opt = begun(args, made, out)
    if model is None:
        return out
    loading.over.set()
    out["pss_GiB"] = [together(pss())]
    if args.pss:
        out["pss_load_GiB"] = round(most_together(of_each(loading.found)) / GIB, 2)
    if args.generate:
        evaluated(args, model, out)
    with warnings.catch_warnings(record=True) as told:
        (by_trainer if args.trainer else looped)(args, model, opt, clock, out)
    out["told"] = list(dict.fromkeys(str(w.message) for w in told))
    if found := own_plan(model):
        out["planned"] = found
    rates(args, out)
    out["wall_s"] = [round(b - a, 3) for a, b in itertools.pairwise(clock.wall)]
    if cuda:
        watch.over.set()
        out["peak_GiB"] = by_rank(round(watch.most / GIB, 2))
        out["torch_peak_GiB"] = by_rank(round(torch.cuda.max_memory_allocated() / GIB, 2))
    out["pss_GiB"].append(together(pss()))
    out["rss_GiB"] = round(resident() / GIB, 2)
    with contextlib.suppress(Exception):
        text = mt.explain(model)
        out |= columns(text)
        if args.explain:
            out["explain"] = text
    if args.bits:
        out["weights"] = bits_of(model)
    out["process_s"] = round(time.perf_counter() - born, 1)
    if several() > 1:
        if alone is not None:
            out["alone"], out["gain"] = alone, round(out["tokens_s"] / alone["tokens_s"], 3)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return out


def rates(args, out):
    """Of the steps, whose times are known."""
    tokens = [rows * seq for rows, seq in lengths(args)]
    if several() > 1:                    # as long as with the slowest
        out["ranks"], out["seconds"] = several(), [max(each) for each in zip(*of_each(out["seconds"]))]
        tokens = [sum(each) for each in zip(*of_each(tokens))]
    seconds = out["seconds"]
    skip = min(args.skip, len(seconds) - 1)
    late = seconds[skip:]
    if args.vary:
        out |= {"tokens": tokens, "mean_tokens": round(statistics.mean(tokens)),
                "tokens_s": round(sum(tokens[skip:]) / sum(late), 1)}
    else:
        out |= {"median_s": round(statistics.median(late), 5), "fastest_s": min(late),
                "tokens_s": round(several() * args.tokens / statistics.median(late), 1),
                "first_three_s": round(sum(seconds[:3]), 3)}


def by_rank(value):
    found = of_each(value)
    return found if several() > 1 else value


def together(nbytes):
    return round(sum(of_each(nbytes)) / GIB, 2)


# ---- many ----------------------------------------------------------------------------------------

def parsed(words):
    args = parser().parse_args(words)
    args.words = words
    if args.tokens % args.seq or args.tokens // args.seq % (args.micro or 1):
        raise SystemExit(f"--tokens {args.tokens}: no multiple of seq {args.seq} x micro {args.micro}")
    return args


def ended(pid, until):
    """Exit status of a child, which is killed when the time is over."""
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return "no time left"
        time.sleep(0.02)


def forked(args, package, made, out, log, until):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)              # the threads that made the weights are gone
        pid = os.fork()
    if pid:
        return ended(pid, until)
    code = 1
    try:
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(1, 9)                                # ends with its parent
        for n in (1, 2):
            os.dup2(log.fileno(), n)
        if package != "-":
            sys.path.insert(0, package)
        line = json.dumps(run(args, dict(made)))
        with open(out, "a") as f:
            f.write(line + "\n")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def fresh(args, package, out, log, until):
    env = dict(os.environ)
    if package != "-":
        env["PYTHONPATH"] = package + os.pathsep + env.get("PYTHONPATH", "")
    with open(out, "a") as f:
        command = [sys.executable, os.path.abspath(__file__), *args.words]
        child = subprocess.Popen(command, env=env, stdout=f, stderr=log)
    try:
        return child.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return "no time left"


def last_line(path):
    with contextlib.suppress(OSError, ValueError, IndexError):
        return json.loads(open(path).read().splitlines()[-1])
    return {}


def jobs(args):
    began = time.monotonic()
    until = began + args.seconds
    lines = [shlex.split(line, comments=True) for line in open(args.jobs)]
    todo = [(label, package, parsed(["--label", label, *words])) for label, package, *words in filter(None, lines)]
    failed, made, made_for = 0, None, None
    if not args.python:
        import torch
        import torch.utils.data  # noqa: F401
        import transformers.models.qwen2.modeling_qwen2  # noqa: F401
        from transformers import AutoModelForCausalLM, Trainer  # noqa: F401
    with open(args.out + ".log", "a") as log:
        for label, package, one in todo * args.repeat:
            if time.monotonic() > until:
                print(f"{label} {package}: not begun", flush=True)
                failed += 1
                continue
            print(f"==== {label} {package} {' '.join(one.words)}", file=log, flush=True)
            at = time.monotonic()
            if not args.python and made_for != shape_of(one):
                made = None
                made, made_for = weights(one), shape_of(one)
            code = (fresh(one, package, args.out, log, until) if args.python
                    else forked(one, package, made, args.out, log, until))
            failed += code != 0
            said = last_line(args.out) if code == 0 else {}
            print(f"{time.monotonic() - began:5.0f} s  {label} {os.path.basename(package)}: "
                  + (f"rc {code}" if code else f"{said.get('tokens_s', 0):,.0f} tokens/s  {said.get('median_s')} s  "
                     f"{said.get('peak_GiB')} GiB  plan {said.get('planned', {}).get('choice')}")
                  + f"  ({time.monotonic() - at:.1f} s)", flush=True)
    return failed


def main():
    args = parsed(sys.argv[1:])
    if several() > 1 and (args.jobs or args.repeat > 1 or args.dry):
        raise SystemExit("--jobs, --repeat and --dry are for one process; torchrun starts several")
    if args.jobs:
        return 1 if jobs(args) else 0
    if args.repeat > 1:
        words = [w for i, w in enumerate(args.words) if w != "--repeat" and (i == 0 or args.words[i - 1] != "--repeat")]
        return max(subprocess.call([sys.executable, os.path.abspath(__file__), *words]) for _ in range(args.repeat))
    line = json.dumps(run(args))
    if rank() == 0:
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
