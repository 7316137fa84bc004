"""Several GPUs beside one, in one start: README's loop and what people run, and a table.

    torchrun --nproc-per-node 2 benchmarks/bench_two.py [--out lines.jsonl]
    torchrun --nproc-per-node 2 benchmarks/bench_two.py --runs "--tokens 8192 --plan" "--tokens 2048"

Each run is arguments of bench_loop.py. Rank 0 makes it by itself first (--no-alone: it does not; Trainer's as a plain
loop), then all together; the model's weights are made once. gain: tokens/s of all by one's. --bits: all make it again,
and whether losses and norms are equal.
"""
import argparse
import gc
import json
import os
import statistics
import time

import bench_loop as loop

RUNS = ("--tokens 32768 --plan", "--tokens 32768", "--tokens 8192 --plan", "--tokens 2048 --plan",
        "--tokens 8192 --trainer", "--tokens 32768 --plan --products fp8", "--tokens 32768 --plan --lora 16",
        "--tokens 8192 --lora 16 --trainer")


def measured(args, made, group):
    """tokens/s and the plan's, seconds of each step, device memory of each rank and host memory of all, GiB."""
    import torch
    out, cuda = {}, args.device != "cpu" and torch.cuda.is_available()
    watch = loop.Watch(cuda)
    clock, many = loop.Clock(cuda, watch), 1 if group is not None else loop.several()
    model, opt = loop.begun(args, dict(made) if made else None, out, group)
    (loop.by_trainer if args.trainer and many > 1 else loop.looped)(args, model, opt, clock, out)
    each = [out["seconds"]] if many == 1 else loop.of_each(out["seconds"])
    seconds = [max(all_ranks) for all_ranks in zip(*each)]
    watch.over.set()
    stats = torch.cuda.memory_stats() if cuda else {}
    found = {"seconds": seconds, "tokens_s": round(many * args.tokens / statistics.median(seconds[args.skip:])),
             "planned": out.get("planned"), "losses": out["losses"], "norms": out["norms"],
             "retries": stats.get("num_alloc_retries", 0)}
    peak, pss = round(watch.most / loop.GIB, 2), loop.pss() / loop.GIB
    found["peak_GiB"], found["pss_GiB"] = ([peak], round(pss, 2)) if many == 1 else (
        loop.of_each(peak), round(sum(loop.of_each(pss)), 2))
    del model, opt
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return found


def alone(args, made, group, store, number):
    """By rank 0, while the others wait."""
    found = measured(args, made, group) if loop.rank() == 0 else None
    if loop.rank() == 0:
        store.set(f"alone {number}", "")
    store.wait([f"alone {number}"])
    return found


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--runs", nargs="*", default=RUNS)
    ap.add_argument("--no-alone", action="store_true")
    ap.add_argument("--bits", action="store_true")
    ap.add_argument("--out", default="two.jsonl")
    asked = ap.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from torch import distributed as dist
    runs = [loop.parsed(run.split()) for run in asked.runs]
    loop.joined(torch.cuda.is_available() and runs[0].device != "cpu")
    solo, begun = dist.new_group([0]), time.time()
    store = dist.PrefixStore("two", dist.distributed_c10d._get_default_store())
    made, made_for = None, None
    for number, args in enumerate(runs):
        if loop.rank() == 0 and made_for != loop.shape_of(args):
            made, made_for = loop.weights(args), loop.shape_of(args)
        one = None if asked.no_alone else alone(args, made, solo, store, number)
        many = measured(args, made, None)
        again = measured(args, made, None) if asked.bits else None
        if loop.rank() == 0:
            line = {"run": asked.runs[number], "ranks": loop.several(), "many": many, "one": one}
            line["gain"] = round(many["tokens_s"] / one["tokens_s"], 3) if one else None
            line["equal_bits"] = again and all(again[k] == many[k] for k in ("losses", "norms"))
            said = "" if not many["planned"] else f" (said {many['planned']['tokens_s']:,})"
            print(f"{time.time() - begun:5.0f} s  {asked.runs[number]}: {many['tokens_s']:,} tokens/s{said}"
                  + (f", one {one['tokens_s']:,}, gain {line['gain']}" if one else "")
                  + f", device {many['peak_GiB']} GiB, host {many['pss_GiB']}, retries {many['retries']}"
                  + (f", equal bits: {line['equal_bits']}" if again else ""), flush=True)
            with open(asked.out, "a") as f:
                f.write(json.dumps(line) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
