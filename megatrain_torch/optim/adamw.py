"""mt.AdamW: a torch optimizer whose step runs on the host, behind the next forward."""
from __future__ import annotations

import contextlib
import functools
import importlib
import math
import numbers
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import optimizer as torchs

from ..base import patches
from ..base.errors import MegatrainError
from ..base.modes import check_states
from ..store import gradient
from ..store.guard import StreamedParameter, guard, plain, take_back
from ..store.records import DTYPES, Record
from ..store.state import in_backward
from . import states as stored
from .states import CODES, Late

if TYPE_CHECKING:
    from ..model.runtime import Runtime

REFUSED = ("amsgrad", "differentiable", "capturable")       # of torch's AdamW
_NOT_STREAMED = "AdamW: it updates parameters of a streamed model"
_SEVERAL = "AdamW: these are parameters of several streamed models: make an mt.AdamW for each"
RESULTS_KEPT = 64       # of an engine's updates that may be unread before the oldest is asked for; it keeps 128


def check_group(group: dict[str, Any]) -> None:
    """Raises MegatrainError where a group asks for what is not supported: made here, written later, or loaded."""
    for name in REFUSED:
        if group.get(name):
            raise MegatrainError(f"AdamW: {name}=True is not supported; use torch.optim.AdamW on the host tensors for "
                                 "that")
    if not group.get("decoupled_weight_decay", True) and group["weight_decay"] != 0:
        raise MegatrainError(f"AdamW: weight_decay={group['weight_decay']} with decoupled_weight_decay=False is Adam's "
                             "decay, which is not supported")


def _check_limit(max_grad_norm: float | None, in_backward: bool) -> None:
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise MegatrainError(f"AdamW: max_grad_norm={max_grad_norm} must be > 0, or None for no clipping")
    if max_grad_norm is not None and in_backward:
        raise MegatrainError("AdamW: in_backward=True cannot clip: the norm is known only when backward ends")


# Updates handed to the engine: counts that took them for done, of skipped ones they are taken back; and what waits for
# the gradients and gives (norm before clipping, units skipped).
Handed = tuple[list[Tensor], Callable[[], tuple[float, int]]]
# What is asked of an engine for one parameter: its record, its step count, and the item as Engine.adam takes it.
Work = tuple[Record, Tensor, tuple[Any, ...]]


class AdamW(torch.optim.Optimizer):
    """AdamW with its states and fp32 masters in host memory.

    `step()` returns at once; updates run in forward order, and each unit's next fetch waits for its
    own update only. Reading a parameter or `state_dict()` waits for what it needs.

    bf16 weights get an fp32 master: the weight itself plus 16 bits that continue it (`mt.masters`).
    With moments in fp32, 12 bytes per parameter, 14 with the gradient that waits for the norm. Order of
    operations, how far from exact, and what moments of 8 bits do to training: docs/numerics.md.

    Updates use what `state` and `param_groups` show. You may write `opt.state[p]["step"]` and moments, through views
    too, put other tensors or dicts in their place, or call `opt.state.clear()`.

    All parameters that train are those of one streamed model; another optimizer takes others, such as torch's.

    A step whose gradients are not all finite changes nothing and is counted (`skipped_steps`); with in_backward that
    goes for each unit.

    Args:
        params: as in torch: parameters, (name, parameter) pairs, or groups.
        lr, betas, eps, weight_decay, maximize: as in torch.optim.AdamW.
        max_grad_norm: clip the global norm of all gradients to this, exactly, as
            torch.nn.utils.clip_grad_norm_ would; None: no clipping.
        states: how moments and masters are kept; the bytes are of a bf16 parameter, its weight counted in:
            "fp32": 12. "8bit": 6.06, moments in 8 bits with fp32 scales for every 128 elements. "8bit-sr": 4.06, the
            same without a master: the weight is rounded stochastically.
            Of fp32 and fp16 parameters only the moments change. None: as mt.stream's plan has it, else "fp32".
            A model's states are of one format.
        in_backward: update each unit as soon as backward has its gradient, without waiting for
            step(). A promise that every backward() is followed by step() and that nobody changes
            gradients or `param_groups` in between; needs max_grad_norm=None.

    Raises:
        MegatrainError: an argument is outside its range. An option of torch's AdamW is not supported here
            (amsgrad, differentiable, capturable). Or there is no memory for gradients and states; then none is
            allocated.

    Source: Loshchilov & Hutter 2019, Algorithm 2.
    """

    _known: list[int] = []           # ids of parameters as of the last look

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 1e-2, *, max_grad_norm: float | None = None,
                 states: str | None = None, maximize: bool = False, in_backward: bool = False,
                 **torch_only: Any) -> None:
        for name in torch_only:
            if name not in (*REFUSED, "foreach", "fused"):
                raise TypeError(f"AdamW() got an unexpected keyword argument {name!r}")
        check_group(torch_only)
        if not isinstance(lr, numbers.Real | Tensor):
            raise MegatrainError(f"AdamW: lr={lr!r} must be a number")
        if not 0.0 <= float(lr) < math.inf:
            raise MegatrainError(f"AdamW: lr={lr} must be >= 0 and finite")
        if not all(0.0 <= b < 1.0 for b in betas) or eps < 0 or weight_decay < 0:
            raise MegatrainError(f"AdamW: betas={betas}, eps={eps}, weight_decay={weight_decay}: "
                                 "betas in [0, 1), the others >= 0")
        check_states(states or "fp32")
        _check_limit(max_grad_norm, in_backward)
        self.max_grad_norm = max_grad_norm
        self._in_backward = in_backward
        self._handed: list[Handed] = []                   # by the last step; taken by _catch_up
        self._early: list[Handed] = []                    # by the backward under way, for the next step
        # Updated in the backward under way: what a parameter's group said then, by its pid.
        self._done: dict[int, tuple[float, ...]] = {}
        self._norm: float | None = None
        self._limit_once = math.inf                        # of the next step, beside max_grad_norm
        self._steps = 0                                    # calls of step()
        # Weakly: such a norm asks this optimizer for its value. Of whom nobody has any more, nobody wants it.
        self._asked: weakref.ref[Late] | None = None      # for the next step; taken over by it
        self._late: weakref.ref[Late] | None = None       # of the last step
        self._skipped = 0
        self._states = states
        self._keys: dict[Tensor, int] = {}                 # what a parameter's rounding is drawn from: its number
        self._served: Runtime | None = None                # of the model whose parameters it has, or had
        if "torch._dynamo" not in sys.modules:
            # torch imports it as the first optimizer of a process is made, and keeps a traceback whose frames would
            # hold that optimizer, its parameters and so the store: a thread's hold nothing.
            thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",), name="mt-import")
            thread.start()
            thread.join()
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize))
        _take_clipping()

    def _ask_for_room(self) -> None:
        """Refuses before planes are made that do not fit."""
        if (rt := self._served) is not None:
            try:
                rt.room.states(rt.core)
            except MegatrainError as error:
                if rt.planning is None or not rt.planning.pending:
                    raise
                raise MegatrainError(f"{error}\n\nOr have it planned before: mt.stream(model, tokens=, seq=)") from None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch."""
        super().add_param_group(param_group)
        self._adopt()

    def _adopt(self) -> None:
        """Parameters that came since the last look: by add_param_group, into a group's list, or by mt.stream."""
        self._check_served()
        for group in self.param_groups:
            check_group(group)
        params = [p for group in self.param_groups for p in group["params"]]
        ids = [id(p) for p in params]
        if ids == self._known and self._served is not None:
            return
        if len(set(ids)) < len(ids):
            raise ValueError("some parameters appear in more than one parameter group")
        runtimes = {p._mt.runtime for p in params if isinstance(p, StreamedParameter)}
        if len(runtimes | {self._served} - {None}) > 1:
            raise MegatrainError(_SEVERAL)
        for rt in runtimes:
            if self._states is not None:
                rt.choose_states(self._states)
            if rt is not self._served:
                if rt.planning is not None:
                    rt.planning.adam = True
                if rt.planning is None or not rt.planning.pending:       # else the plan to come asks
                    rt.room.states(rt.core)
            self._served = rt
            rt.served.update(p._mt for p in params if isinstance(p, StreamedParameter) and not self.state.get(p))
            if self._in_backward:
                rt.handover.observer = weakref.ref(self)     # the model tells of its gradients in backward
        for p in params:
            self._keys.setdefault(p, len(self._keys))
        self._known = ids

    # ---- stepping ----

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient.

        Returns at once, with the closure's result if there is one.

        Raises:
            MegatrainError: a worker failed since the last call. The model was unstreamed. in_backward=True, and a
                gradient or its group changed after its update. What was written to `state` or `param_groups` cannot be
                used. A parameter with a gradient is not streamed.
        """
        _take_clipping()
        _check_limit(self.max_grad_norm, self._in_backward)
        self._adopt()
        rt = self._served
        with contextlib.nullcontext() if rt is None else rt.door.held(in_backward()):    # another thread that evaluates
            return self._step(closure)                                                   # sees weights of one step

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        rt = self._served
        if rt is not None:
            rt.handover.broken_off()
        self._catch_up()                     # waits for the gradients of the step before, not for its updates
        self._take_states()
        _fill(self._late)                    # somebody may hold it: from here on `_norm` is this step's
        self._late, self._asked = self._asked, None
        self._steps += 1
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._handed, self._early, self._norm = self._early, [], None
        limit, self._limit_once = min(self.max_grad_norm or math.inf, self._limit_once), math.inf
        if not any(self.state.values()):
            self._ask_for_room()             # the gradients have come since
        units: dict[int, list[Work]] = {}
        for group in self.param_groups:
            numbers = _numbers(group)
            for p in group["params"]:
                if isinstance(p, StreamedParameter):
                    if (work := self._work(p, numbers)) is not None:
                        units.setdefault(p._mt.unit, []).append(work)
                elif p.grad is not None:
                    raise MegatrainError(f"{_NOT_STREAMED}: one of {list(p.shape)} has a gradient; stream the module "
                                         "that has it too, or give it to torch.optim.AdamW")
        if units:
            self._handed.append(self._hand(rt, sorted(units.items()), limit))
        self._done.clear()
        if self._handed:
            rt.core.kick(rt.stream())
            rt.homes.arrivals.stepped()
            rt.handover.unstepped = False
        for who in () if rt is None else (rt.planning, rt.exchange):
            if who is not None:
                who.stepped()
        return loss

    def _hand(self, rt: Runtime, units: list[tuple[int, list[Work]]], limit: float) -> Handed:
        """Submits updates; from here on they count as steps."""
        for u, _ in units:
            if u in rt.homes.filed:                # what is updated there is not what was written here
                for r in rt.units[u]:
                    r.notice_write()
        rt.homes.arrivals.bring(u for u, _ in units)
        steps = [step for _, works in units for _, step, _ in works]
        ticket = rt.core.adam([(u, [item for _, _, item in works]) for u, works in units], limit, rt.stream())
        # A graph on the host that keeps these weights is told by torch that they changed, as by another optimizer.
        records = [record for _, works in units for record, _, _ in works]
        torch.autograd.graph.increment_version([r.host for r in records])
        for r in records:
            r.version = r.host._version
        with torch._C.DisableTorchFunctionSubclass():        # counts without a look at what becomes of the updates
            torch._foreach_add_(steps, 1)
        return steps, functools.cache(functools.partial(rt.core.norm, ticket))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. With set_to_none waits for nothing but a norm that was asked for and not stepped with; else for
        the updates that still read the gradients."""
        if self._served is not None:
            self._served.handover.broken_off()
        if self._asked is not None:          # a batch that is dropped, its limit too
            _fill(self._asked)
            self._asked, self._limit_once = None, math.inf
        gradient.clear((p for group in self.param_groups for p in group["params"]), set_to_none)

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the last step's gradients before clipping; waits for them. None before the first step."""
        self._catch_up()
        return self._norm

    @property
    def skipped_steps(self) -> int:
        """Steps so far whose gradients were not finite. Waits for the gradients of the last."""
        self._catch_up()
        return self._skipped

    def _catch_up(self) -> None:
        """Takes the results of the last step: what was skipped has not stepped."""
        if not self._handed:
            return
        self._check_served()
        handed = self._handed
        try:
            results = [result() for _, result in handed]           # waits: an interruption leaves all as it is
        except Exception:
            self._handed = []
            raise
        self._handed = []
        if self._norm is None:
            self._norm = math.hypot(*(norm for norm, _ in results))
        skipped = [step for (steps, _), (_, skips) in zip(handed, results) if skips for step in steps]
        if skipped:
            with torch._C.DisableTorchFunctionSubclass():
                torch._foreach_sub_(skipped, 1)
            self._skipped += 1

    def _check_served(self) -> None:
        """That the store with states of its parameters is not gone."""
        rt = self._served
        first = None if rt is None else next((r for r in rt.records if r.param is not None), None)
        if first is not None and getattr(first.param, "_mt", None) is not first:
            raise MegatrainError("this mt.AdamW belonged to a model that was unstreamed, and its states went with the "
                                 "store: make a new one")

    # ---- a limit that is given with each step: _take_clipping ----

    def clips_alone(self, params: list[Tensor]) -> bool:
        """Are these parameters' gradients all that the next step() uses, and not clipped yet?"""
        if self._asked is not None:
            _fill(self._asked)
            if not self._in_backward:
                return False
        mine = {p for g in self.param_groups for p in g["params"]}
        with torch._C.DisableTorchFunctionSubclass():
            theirs = {p for p in params if p.grad is not None}
            used = {p for p in mine if p.grad is not None}
        return theirs == used and mine <= set(params)

    def clip_next(self, limit: float) -> Late:
        """The next step() clips the global norm of its gradients to this; they stay as they are until then.

        Returns:
            [] fp32, the norm before clipping; reading it waits for the gradients, before step() for longer.

        Raises:
            MegatrainError: in_backward=True, and there is a limit: weights have been updated by now.
        """
        if self._in_backward and limit < math.inf:
            raise MegatrainError(f"clipping to {limit} after mt.AdamW(in_backward=True) has updated: leave in_backward "
                                 "out, or do not clip (TrainingArguments(max_grad_norm=0))")
        steps = self._steps

        def find() -> float:
            if self._steps == steps:           # before any step: of what was updated in backward, else on the host
                if self._early:
                    return math.hypot(*(result()[0] for _, result in self._early))
                params = (p for g in self.param_groups for p in g["params"])         # waits for their gradients
                grads = [gradient.peek(p._mt) if isinstance(p, StreamedParameter) else p.grad for p in params]
                return math.hypot(*(torch.linalg.vector_norm(g, dtype=torch.float64).item() for g in grads
                                    if g is not None))
            self._catch_up()                   # the step was just the next: a later one takes the norm before it begins
            return self._norm or 0.0

        norm = Late.of(find)
        self._limit_once, self._asked = limit, weakref.ref(norm)
        return norm

    # ---- gathering work ----

    def _work(self, p: StreamedParameter, numbers: tuple[float, ...], passing: bool = False) -> Work | None:
        """What the engine is asked for. passing: the gradient is on its way, and kept nowhere."""
        record: Record = p._mt
        if record.pid in self._done:
            stored.check_used(record)
            if numbers != self._done[record.pid]:
                raise MegatrainError(f"{record.name}: its group's lr, betas, eps, weight_decay or maximize changed "
                                     "after its update in backward: with in_backward=True they are set before it")
            return None
        grad = gradient.standing(record)
        if record.numel == 0 or (grad is None and not passing):
            return None
        late = grad is record.late           # the usual case: nobody has looked at it
        del grad                             # nor have we
        if record.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise MegatrainError(f"{record.name}: AdamW trains fp32, bf16 and fp16 parameters, not {record.dtype}")
        rt, state = record.runtime, self.state.get(p)
        if record.host._version != record.version:
            record.after_write()
        if not state:
            state = self._begin_state(p, record)
        elif record.optimizer is None or record.optimizer() is not self:
            raise MegatrainError(f"{record.name}: its AdamW states belong to another mt.AdamW by now; "
                                 "use one optimizer")
        stored.follow_weight(record)
        record.exact, record.master_writes = None, record.writes
        if not (passing or rt.room.asked.keeps):
            raise MegatrainError(f"{record.name}: it has a .grad of its own, and plan={{'grads': 'none'}} has no place "
                                 "for one: no hooks on the parameter, no arithmetic on it outside of the model")
        address, changed = (0, record.written) if passing or late else stored.source_of(record)
        *usual, maximize = numbers
        step = state["step"]
        return record, step, (record.index, *usual, stored.count_of(step, record.name) + 1, maximize, address,
                              DTYPES[record.dtype], int(changed), self._keys[p])

    def _begin_state(self, p: StreamedParameter, record: Record, keep: bool = False) -> stored.StoreStates:
        """States over new planes, which are zero; keep: with the moments that are in them."""
        if record.runtime is not self._served:               # streamed since the parameters were looked at
            raise MegatrainError(_SEVERAL)
        record.runtime.states_chosen = True
        there = self.state.get(p)
        if isinstance(there, stored.StoreStates) and there.record is record:        # somebody may hold it
            there.clear()
            there.update(there.own)
            there.own["step"].zero_()
        else:
            moments = {name: guard(record.view(plane), record)
                       for name, plane in stored.moment_planes(record).items()}
            catch_up = weakref.WeakMethod(self._catch_up)
            step = Late.of(lambda: (own := catch_up()) and own())
            there = self.state[p] = stored.StoreStates(record, {"step": step, **moments})
        if record.optimizer is not None and not keep:
            record.wait_used()
            record.own_states()
            for plane in record.moments:
                record.view(plane).zero_()
            record.push(*record.moments)
        record.optimizer = weakref.ref(self)
        return there

    @torch.no_grad()
    def _take_states(self) -> None:
        """What was put into self.state in the place of the store's own, tensors or whole dicts, is copied into the
        store. Raises MegatrainError where a moment is missing, or of another shape, or the count is no number."""
        put = [p for p, s in self.state.items() if isinstance(p, StreamedParameter) and s
               and p._mt.runtime is self._served and not (isinstance(s, stored.StoreStates) and s.record is p._mt
                                                          and all(s.get(name) is t for name, t in s.own.items()))]
        if put:
            self._load([(p, stored.check_state(p._mt.name, p.shape, self.state[p]), self._keys[p]) for p in put])

    # ---- updating inside backward ----

    @torch.no_grad()
    def _update_now(self, unit: int, records: list[Record]) -> None:
        """A unit's gradients are on their way home: its update follows them. Runs in autograd's thread."""
        self._adopt()
        self._catch_up()                       # what the step before skipped counts no more; known for a forward
        if not self._early:
            self._take_states()
        groups = {p: g for g in self.param_groups for p in g["params"]}
        works: list[Work] = []
        for r in records:
            if r.param in groups:
                if r.pid in self._done:
                    raise MegatrainError(f"{r.name}: a second backward before step(); in_backward=True updates at "
                                         "every backward, so accumulate with in_backward=False")
                work = self._work(r.param, _numbers(groups[r.param]), not r.runtime.room.asked.keeps)
                works += [] if work is None else [work]
        if not works:
            return
        self._early.append(self._hand(records[0].runtime, [(unit, works)], 0.0))
        if len(self._early) > RESULTS_KEPT:
            self._early[-RESULTS_KEPT - 1][1]()
        for record, _, _ in works:
            self._done[record.pid] = _numbers(groups[record.param])

    def _declines(self, records: list[Record]) -> str:
        """Why it will not use these gradients in backward; "": it will."""
        known = {p for g in self.param_groups for p in g["params"]}
        if missing := [r for r in records if r.param not in known]:
            return f"the optimizer does not have {missing[0].name}"
        return "this is a second backward before step()" if any(r.pid in self._done for r in records) else ""

    # ---- copies ----

    def __getstate__(self) -> dict[str, Any]:
        """Raises MegatrainError, for copy.deepcopy and pickle."""
        raise MegatrainError("an mt.AdamW can be neither copied nor pickled: its states are in the model's store; use "
                             "state_dict(), or mt.save")

    # ---- saving and loading ----

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with `master` (fp32 values) for 16-bit parameters. `key` seeds a parameter's rounding; it is
        there if it is not the parameter's place in the groups. Waits for updates.

        Moments of 8 bits stay as they are, so that training goes on with the same bits. `exp_avg_codes` and
        `exp_avg_sq_codes` [shape], and `scales` [groups,2], stand for `exp_avg` and `exp_avg_sq`. `moments(p)` has
        them in fp32.

        Raises:
            MegatrainError: states that live on the device do not fit the host; or its model was unstreamed.
        """
        self._check_served()
        if self._served is not None:
            self._served.room.copies(self._served.core)
            self._served.core.drain()
        self._catch_up()
        self._take_states()
        out = super().state_dict()
        index = {id(p): i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        for p, s in self.state.items():
            if s:
                number, key = index[id(p)], self._keys[p]        # they differ where it was put into a group
                out["state"][number] = {**s, "step": plain(s["step"]),
                                        **({"master": stored.master(p)} if stored.master_plane(p._mt) else {}),
                                        **({"key": key} if key != number else {})}
        return out

    def moments(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """(first, second moment) of a parameter in fp32: [shape], copies, whatever `states` is. Waits for its update.

        Raises:
            MegatrainError: the parameter has no states in this optimizer yet; or its model was unstreamed.
        """
        self._check_served()
        self._take_states()
        if not self.state.get(p):
            raise MegatrainError("AdamW: this parameter has no states here yet: step() makes them")
        p._mt.wait_used()
        p._mt.bring_states()
        found = {name: p._mt.view(plane) for name, plane in stored.moment_planes(p._mt).items()}
        return stored.decoded(p.shape, p._mt.stride, found) if CODES[0] in found else \
            tuple(t.clone() for t in found.values())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state_dict of mt.AdamW, of any `states`, or of torch.optim.AdamW into the store.

        Raises:
            ValueError: groups or sizes do not match, as in torch.
            MegatrainError: the state is of torch's AdamW(amsgrad=True), or of Adam's own decay; or its model was
                unstreamed.
        """
        self._adopt()
        for group in state_dict["param_groups"]:
            check_group(group)
        if self._served is not None:
            self._served.core.drain()
        self._catch_up()
        super().load_state_dict({**{k: v for k, v in state_dict.items() if k != "state"}, "state": {}})
        flat = [p for g in self.param_groups for p in g["params"]]
        self._load([(flat[index], values, values.get("key", index)) for index, values in state_dict["state"].items()])

    @torch.no_grad()
    def _load(self, given: list[tuple[Tensor, dict[str, Any], int]]) -> None:
        """States of parameters, with their keys. What of them lies in planes is copied before any of these is
        written."""
        known = {*self.state, *(p for g in self.param_groups for p in g["params"])}
        planes = {at for p in known if isinstance(p, StreamedParameter) for at in stored.addresses(p._mt)}
        for p, _, _ in given:
            if not isinstance(p, StreamedParameter):
                raise MegatrainError(f"{_NOT_STREAMED}: states of one of {list(p.shape)} cannot be loaded here")
        for p, values, key in [(p, stored.apart(p._mt, values, planes), key) for p, values, key in given]:
            record, there = p._mt, stored.stand_there(p._mt, values)
            count = stored.count_of(values["step"], record.name)
            self._begin_state(p, record, keep=there)
            self.state[p]["step"].fill_(count)
            if not there:
                stored.load_moments(record, values)
                record.push(*record.moments)
            self._keys[p] = key
            if "master" in values:
                stored.set_master(p, values["master"])


def _numbers(group: dict[str, Any]) -> tuple[float, ...]:
    """What an update takes of a group."""
    b1, b2 = group["betas"]
    return (float(group["lr"]), float(b1), float(b2), float(group["eps"]), float(group["weight_decay"]),
            int(group["maximize"]))


def _fill(norm: weakref.ref[Late] | None) -> None:
    """Its value is there from now on, if somebody has it."""
    if norm is not None and (alive := norm()) is not None:
        alive.settle()


# ---- other people's code, for as long as a model is streamed ----

def _take_clipping() -> None:
    """Once accelerate is imported, a clip_grad_norm_ of its own over the gradients of one prepared mt.AdamW passes the
    limit on to the next step, and its norm is a tensor that waits when it is read. torch's, which else runs, would read
    all gradients on the host in every step, multiply them there, and have the caller wait for both; Trainer calls it
    for the norm alone too."""
    cls = getattr(sys.modules.get("accelerate"), "Accelerator", None)
    if cls is None:
        return
    own = cls.clip_grad_norm_

    @functools.wraps(own)
    def clip_grad_norm_(self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        optimizers = [o.optimizer for o in self._optimizers]
        # Is it certain which optimizer makes the next step?
        certain = len(optimizers) == 1 and self.sync_gradients and self.scaler is None
        if norm_type == 2 and max_norm > 0 and certain and isinstance(optimizers[0], AdamW) \
                and optimizers[0].clips_alone(parameters):
            return optimizers[0].clip_next(float(max_norm))
        return own(self, parameters, max_norm, norm_type)

    patches.once("Accelerator.clip_grad_norm_", lambda: patches.replaced(cls, "clip_grad_norm_", clip_grad_norm_))


def watch_steps() -> None:
    """Another's optimizer gets ordinary parameters to write as it likes, which are streamed again behind its step."""
    before = _disable_dynamo(_before_step)               # a step that is compiled traces its hooks too
    behind = _disable_dynamo(lambda optimizer, *_: take_back([p for g in optimizer.param_groups for p in g["params"]]))
    patches.once("before optimizers' steps", lambda: torchs.register_optimizer_step_pre_hook(before).remove)
    patches.once("behind optimizers' steps", lambda: torchs.register_optimizer_step_post_hook(behind).remove)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, AdamW):
        return
    params = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, StreamedParameter)]
    if type(optimizer).__module__.startswith("torch.optim."):
        # States that were moved to a device come back; other people's optimizers may have theirs there on purpose.
        for states in [found for p in params if (found := optimizer.state.get(p))]:
            for name, value in states.items():
                if isinstance(value, Tensor) and not value.is_cpu:
                    states[name] = value.to("cpu")
    if any(a is not None for a in (*args[1:], *kwargs.values())):        # its closure runs the model
        return
    for p in params:
        if type(p) is StreamedParameter and (grad := p.grad) is not None:       # which is there from now on
            del grad
            p._mt.before_write()
            p.__class__ = torch.nn.Parameter
