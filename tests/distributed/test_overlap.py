"""Weight-grad products that run under collectives: the same gradients, whatever is done with the graph; and time gained."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import peers
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_seqpar import ParallelGroups, ProcessTopology
from lightning_seqpar.activations.regather import RegatheredInput
from lightning_seqpar.activations.wgrad_overlap import BackwardExchange, DeferredWgrad, WgradProduct
from lightning_seqpar.inference.infer import infer_plan
from lightning_seqpar.parallel.apply import parallelize
from lightning_seqpar.parallel.grad_sync import GradSync
from lightning_seqpar.plan.choice import resolve_plans
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import gather_grads
from tests.helpers.models import NoGradient
from tests.helpers.zoo import FeedForward
from tests.mutants import sees

ROUNDS = 4
COLUMNS = 5 + 5 + 4


class Within(peers.Mlp):
    """What is between its linears is run in whatever way is asked for."""

    run: Callable[..., Tensor] = staticmethod(lambda made, x: made(x))

    def made(self, x: Tensor) -> Tensor:
        return nn.functional.silu(self.gate(x)) * self.up(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.run(self.made, x))


class Decoder(peers.Decoder):
    """Whose layers are called in whatever way is asked for."""

    calls: list[Callable[[nn.Module, Tensor], Tensor]]

    def __init__(self, layers: int) -> None:
        peers.HEAD = 4
        super().__init__(32, layers, 64)
        self.layers[0].mlp, self.layers[-1].mlp = Within(32, 1), FeedForward(32, 64)
        self.calls = [lambda layer, x: layer(x)] * layers
        self.order = list(range(layers))
        self.seen: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        self.seen = []
        for at in self.order:
            x = self.calls[at](self.layers[at], x)
            self.seen.append(x)
        return self.head(self.norm(x))


def loss_of(model: Decoder, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def plain(model: Decoder, batch: Tensor, at: int) -> None:
    loss_of(model, batch).backward()


def micro_batches(model: Decoder, batch: Tensor, at: int) -> None:
    for part in batch.chunk(2):
        loss_of(model, part).backward()


def detached_inside(model: Decoder, batch: Tensor, at: int) -> None:
    """Between attention and MLP, where one row follows the other."""
    model.calls[1] = lambda layer, x: (lambda y: y + layer.mlp(layer.mlp_norm(y)))(
        (x + layer.attn(layer.attn_norm(x))).detach()
    )
    loss_of(model, batch).backward()


def no_grad_below(model: Decoder, batch: Tensor, at: int) -> None:
    def still(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return layer(x)

    model.calls[0] = still if at % 2 else lambda layer, x: layer(x)
    loss_of(model, batch).backward()


def other_orders(model: Decoder, batch: Tensor, at: int) -> None:
    model.order = [[0, 1, 2], [2, 1, 0], [1, 1, 0, 2], [0, 0, 0]][at]
    loss_of(model, batch).backward()


def _recomputed(reentrant: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant)


def recomputed(model: Decoder, batch: Tensor, at: int) -> None:
    model.calls = [_recomputed(False)] * 3
    loss_of(model, batch).backward()


def _mlp_recomputed(layer: nn.Module, x: Tensor) -> Tensor:
    x = x + layer.attn(layer.attn_norm(x))
    return x + checkpoint(layer.mlp, layer.mlp_norm(x), use_reentrant=False)


def recomputed_inside(model: Decoder, batch: Tensor, at: int) -> None:
    """The columns are run again, their norm and its gather are not."""
    model.layers[0].mlp.run = functools.partial(checkpoint, use_reentrant=False)
    loss_of(model, batch).backward()
    del model.layers[0].mlp.run


def recomputed_twice(model: Decoder, batch: Tensor, at: int) -> None:
    model.calls[1:] = [lambda layer, x: checkpoint(_mlp_recomputed, layer, x, use_reentrant=False)] * 2
    loss_of(model, batch).backward()


def _within(hooks: Callable[[], Any]) -> Callable[[Any, Tensor], Tensor]:
    def call(layer: Any, x: Tensor) -> Tensor:
        with hooks():
            return layer(x)

    return call


def watched(model: Decoder, batch: Tensor, at: int) -> None:
    """Somebody counts, inside and around checkpoints of both kinds."""

    def counting() -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.nbytes) or x, lambda x: x)

    seen: list[int] = []
    model.calls[1] = _recomputed(at % 2 == 0)
    model.calls[2] = lambda layer, x: checkpoint(_within(counting), layer, x, use_reentrant=at % 2 == 1)
    with counting():
        loss = loss_of(model, batch)
    loss.backward()
    assert seen


def retained(model: Decoder, batch: Tensor, at: int) -> None:
    loss = loss_of(model, batch)
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def two_forwards(model: Decoder, batch: Tensor, at: int) -> None:
    (loss_of(model, batch) + loss_of(model, batch.flip(0))).backward()


def some_then_all(model: Decoder, batch: Tensor, at: int) -> None:
    """A part of the graph, then all of it."""
    loss = loss_of(model, batch)
    torch.autograd.grad(loss, [model.layers[1].attn.k.weight, model.layers[0].mlp.up.weight], retain_graph=True)
    torch.autograd.grad(loss, model.seen[1], retain_graph=True)
    loss.backward()


def halve(weight: Tensor) -> None:
    weight.grad.mul_(0.5)


def backward_in_a_hook(model: Decoder, batch: Tensor, at: int) -> list[Any]:
    """Of the same graph, in the middle of its backward."""
    again, beside = [True], []

    def other(grad: Tensor) -> None:
        if again and again.pop():
            wanted = [model.layers[1].attn.q.weight, model.layers[0].mlp.down.weight]
            for weight, one in zip(wanted, torch.autograd.grad(loss, wanted, retain_graph=True), strict=True):
                beside.append((weight, one))

    attn = model.layers[1].attn
    hook = (
        attn.k.register_forward_hook(lambda module, args, out: out.register_hook(other) and None)
        if at % 2
        else attn.register_forward_pre_hook(lambda module, args: args[0].register_hook(other) and None)
    )
    loss = loss_of(model, batch)
    loss.backward(retain_graph=True)
    for weight, one in beside:
        weight.grad += one
    return [hook]


def hooked(model: Decoder, batch: Tensor, at: int) -> list[Any]:
    weights = [model.layers[1].attn.q.weight, model.layers[1].mlp.down.weight]
    hooks = [weights[0].register_hook(lambda grad: 3 * grad)]
    hooks.append(weights[1].register_post_accumulate_grad_hook(halve))
    micro_batches(model, batch, at)
    return hooks


def hooked_inside(model: Decoder, batch: Tensor, at: int) -> list[Any]:
    """The gradient of what was gathered is scaled where the module's code has it."""

    def scale(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: 0.5 * grad)

    def scale_after(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        scale(module, args)

    kept = []
    hooks = [
        model.layers[1].attn.register_forward_pre_hook(scale),
        model.layers[2].mlp.fc1.register_forward_hook(scale_after),
        model.layers[2].attn.register_forward_pre_hook(lambda module, args: kept.append(args[0])),
    ]
    loss = loss_of(model, batch)
    kept.pop().register_hook(lambda grad: 0.5 * grad)  # nobody holds the tensor any more
    loss.backward()
    return hooks


def flattened(model: Decoder, batch: Tensor, at: int) -> list[Any]:
    """Tokens in one dim; and a hook sees the gradient of what is read so."""

    def flat(layer: nn.Module, x: Tensor) -> Tensor:
        x = x + layer.attn(layer.attn_norm(x))
        return x + layer.mlp(layer.mlp_norm(x).flatten(0, 1)).view_as(x)

    model.calls[1] = flat
    hook = model.layers[1].mlp.register_forward_pre_hook(
        lambda _, args: args[0].register_hook(lambda grad: 0.5 * grad) and None
    )
    loss_of(model, batch).backward()
    return [hook]


def column_beside(model: Decoder, batch: Tensor, at: int) -> list[Any]:
    """What a column made is kept, and is not in the loss."""
    kept = []
    mlp = model.layers[1].mlp
    hook = (mlp.up if at % 2 else mlp.gate).register_forward_hook(lambda _, args, out: kept.append(out) or out.detach())
    loss_of(model, batch).backward()
    return [hook]


def _cut(model: Decoder, batch: Tensor, *modules: nn.Module) -> list[Any]:
    hooks = [module.register_forward_hook(lambda _, args, out: NoGradient.apply(out)) for module in modules]
    loss_of(model, batch).backward()
    assert any(parameter.grad is None for parameter in model.parameters())
    return hooks


def cut_behind_columns(model: Decoder, batch: Tensor, at: int) -> list[Any]:
    """The columns' sum does not wait for a column that has no gradient: of two one, or both, or all of an attention's."""
    mlp = model.layers[1].mlp
    return _cut(model, batch, *((mlp.up,), (mlp.gate,), (mlp.gate, mlp.up), (model.layers[1].attn,))[at])


def cut_behind_a_part(model: Decoder, batch: Tensor, at: int) -> list[Any]:
    """All that comes before has no gradient: behind a row, between the blocks, behind a norm, behind the embedding."""
    second = model.layers[1]
    return _cut(model, batch, (second.mlp.down, second, second.mlp_norm, model.tokens)[at])


def read_beside(model: Decoder, batch: Tensor, at: int) -> list[Any]:
    """Others than columns read what was gathered for them."""

    def scaled(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out * args[0].mean(-1, keepdim=True)

    names = ("gate", "up") if at % 2 else ("up",)
    hooks = [getattr(model.layers[1].mlp, name).register_forward_hook(scaled) for name in names]
    loss_of(model, batch).backward()
    return hooks


def given_up(model: Decoder, batch: Tensor, at: int) -> None:
    """A backward that raises half way leaves nothing for the next."""

    def fail(grad: Tensor) -> None:
        raise ArithmeticError

    loss = loss_of(model, batch)
    model.seen[0].register_hook(fail)
    with pytest.raises(ArithmeticError):
        loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    loss_of(model, batch).backward()


USES = {
    use.__name__: use
    for use in (
        plain, micro_batches, detached_inside, no_grad_below, other_orders, recomputed,
        recomputed_inside, recomputed_twice, watched, retained, two_forwards, some_then_all, hooked,
        backward_in_a_hook, hooked_inside, flattened, column_beside, cut_behind_columns, cut_behind_a_part, read_beside,
        given_up,
    )
}  # fmt: skip


def make(tp: int, sp: bool, regather: Any = True) -> tuple[Decoder, Any, ParallelGroups]:
    groups = ParallelGroups(ProcessTopology(["dp", "tp"], [dist.get_world_size() // tp, tp]), dist.get_rank())
    torch.manual_seed(0)
    model = Decoder(3).double()
    plans = resolve_plans("auto", model, lambda: infer_plan(model, (torch.zeros(4, 8, dtype=torch.long),), tp).plan)
    record = parallelize(model, plans, groups, sp=sp, regather=regather)
    return model, record, groups


SHORT = ("watched", "flattened", "cut_behind_columns", "cut_behind_a_part")
FEW = ("plain", "micro_batches", "detached_inside", "other_orders", "recomputed", "two_forwards")


def check_uses(tp: int, sp: bool, names: Sequence[str], regather: Any = True) -> dict[str, int]:
    counts = {}
    for name in names:
        use = USES[name]
        model, record, groups = make(tp, sp, regather)
        torch.manual_seed(0)
        reference = Decoder(3).double()
        sync = GradSync(record.layout, groups)
        with Late() as late:
            for at in range(ROUNDS):
                round_of(use, at, model, record, sync, reference)
        counts[name] = late.count
    return counts


def round_of(use: Any, at: int, model: Decoder, record: Any, sync: GradSync, reference: Decoder) -> None:
    batch = torch.randint(0, 64, (4, 7 + at), generator=torch.Generator().manual_seed(at))
    for one in (model, reference):
        for parameter in one.parameters():
            parameter.grad = None
        for region in record.regions if one is model else ():
            region.reset()
        sync.attach()
        for hook in use(one, batch, at) or ():
            hook.remove()
    sync.flush()
    compare(f"{use.__name__}, round {at}", gather_grads(model), reference)


class Late:
    """Counts the products that were made while a collective was under way."""

    def __enter__(self) -> Late:
        self.count, self._under_way = 0, 0
        self._plain = (BackwardExchange.give, BackwardExchange.take, DeferredWgrad.take)

        def give(slot: BackwardExchange, *args: Any) -> Any:
            self._under_way += 1
            return self._plain[0](slot, *args)

        def end(slot: BackwardExchange, *args: Any) -> Any:
            self._under_way -= bool(slot._pending._values)
            return self._plain[1](slot, *args)

        def take(late: DeferredWgrad) -> Any:
            self.count += self._under_way
            return self._plain[2](late)

        BackwardExchange.give, BackwardExchange.take, DeferredWgrad.take = give, end, take
        return self

    def __exit__(self, *error: Any) -> None:
        BackwardExchange.give, BackwardExchange.take, DeferredWgrad.take = self._plain


def compare(what: str, found: dict[str, Tensor | None], reference: nn.Module) -> None:
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    norm = torch.stack([grad.norm() for grad in expected.values() if grad is not None]).norm()
    for name, grad in expected.items():
        own = found[name]
        assert (own is None) == (grad is None), f"{what}: {name} has {'no' if own is None else 'a'} gradient"
        if grad is not None:
            assert (own - grad).norm() <= 1e-12 * norm, f"{what}: {name} is off by {(own - grad).norm() / norm:.1e}"


@sees(
    "weight-grad products made before their collective starts",
    "defer_wgrad",
    "    set_sequence_nr(given, number)\n",
    "",
)
@sees(
    "a collective waited for where it starts",
    "_over",
    "        set_sequence_nr(waits, max(number - 1, 0))\n",
    "        set_sequence_nr(waits, number + 2)\n",
)
@sees(
    "the columns' products left out of the gradient of their input",
    "BackwardExchange.add_product",
    "            total.addmm_(grad, right)",
    "            pass",
)
@sees(
    "a backward in a hook shares the place of the outer one",
    "PerBackward.put",
    "self._values[current_backward()] = value",
    "self._values = {current_backward(): value}",
)
@sees(
    "what a backward in a hook gathered is not gathered again",
    "RegatheredInput.take",
    "        self.start(kept)  # does nothing, unless a hook ran another backward in between\n",
    "",
)
@sees(
    "a checkpoint's input taken for its norm's",
    "NormCall.source",
    " and keeper() == self._keeper else None",
    " else None",
)
@sees(
    "a checkpoint's input taken for what was gathered outside",
    "ColumnInputs.find_regathered",
    "return read.handle if keeper() == read.handle.keeper else None",
    "return read.handle",
)
@sees(
    "columns that a backward does not come to are waited for",
    "BackwardExchange._count",
    "return sum(will_run(node) for node in nodes)",
    "return len(nodes)",
)
@sees(
    "zeros where the output of a column has no gradient",
    "ShardedLinear.forward",
    "        ctx.set_materialize_grads(False)\n        dtype = _autocast_dtype(x)\n        ctx.late",
    "        dtype = _autocast_dtype(x)\n        ctx.late",
)
@sees(
    "columns' sum waits for one that has no gradient",
    "ShardedLinear._skip",
    "total = ctx.slot.skip_product()",
    "pass",
)
@sees(
    "zeros where the output of a norm has no gradient",
    "_Norm.forward",
    "        ctx.set_materialize_grads(False)\n        ctx.call = call\n",
    "        ctx.call = call\n",
)
@sees(
    "zeros where the output of a row has no gradient",
    "_CollectiveOver.forward",
    "        ctx.set_materialize_grads(False)\n",
    "",
)
@sees(
    "the result of a collective that was started not taken",
    "BackwardExchange.take",
    "        return grad if pending is None else pending.wait()\n",
    "        return grad\n",
)
@sees(
    "an input gathered for another backward is used",
    "RegatheredInput._begin",
    "        if self._task != task:\n",
    "        if False:\n",
)
@pytest.mark.more
def test_gradients_are_those_of_one_process_whatever_is_done():
    counts = run_distributed(check_uses, 2, 2, True, list(USES))[0]
    assert all(counts.values())
    assert counts["plain"] == ROUNDS * (COLUMNS + 2 * 3 - 1)  # and rows but the first


@pytest.mark.matrix
@pytest.mark.parametrize(("world", "tp", "sp"), [(4, 2, True), (4, 4, True), (2, 2, False)])
def test_they_are_on_other_ranks_and_without_shards(world, tp, sp):
    counts = run_distributed(check_uses, world, tp, sp, FEW if sp else list(USES))[0]
    assert all(counts.values())
    assert counts["plain"] == ROUNDS * (COLUMNS + (2 * 3 - 1 if sp else 0))


@sees(
    "zeros where the output of a row that makes little has no gradient",
    "_Pair.forward",
    "        ctx.set_materialize_grads(False)\n",
    "",
    case="True",
)
@sees(
    "an activation in a checkpoint under somebody's hooks needs no gradient",
    "_settle",
    "value._local = value._local.detach().requires_grad_()",
    "pass",
    case="True",
)
@pytest.mark.more
@pytest.mark.parametrize("sp", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_gradients_are_those_of_one_process_where_nothing_waits(sp):
    assert not any(run_distributed(check_uses, 2, 2, sp, (*FEW, *SHORT) if sp else FEW, "auto")[0].values())


def left_over() -> int:
    """Of a backward whose graph is kept: products to run, and what was gathered, summed or sent."""
    model, _, _ = make(2, True)
    loss = loss_of(model, torch.randint(0, 64, (4, 8)))
    loss.backward(retain_graph=True)
    found = {
        kind: [one for one in gc.get_objects() if type(one) is kind]
        for kind in (WgradProduct, RegatheredInput, BackwardExchange)
    }
    held = [*found[WgradProduct]]
    held += [x for one in found[RegatheredInput] for x in (one._whole, one._pending) if x is not None]
    held += [
        x for one in found[BackwardExchange] for x in (*one._sums._values.values(), *one._pending._values.values())
    ]
    assert found[RegatheredInput]
    assert found[BackwardExchange]
    return len(held)


@sees(
    "what a backward left is not let go",
    "PerBackward.take",
    "return self._values.pop(current_backward(), None)",
    "return self._values.get(current_backward())",
)
@sees(
    "what was gathered again is not let go after its last user",
    "RegatheredInput._end",
    "            self._whole, self._task = None, NO_BACKWARD",
    "            self._task = NO_BACKWARD",
)
def test_a_backward_lets_go_of_what_it_made_though_the_graph_is_kept(found):
    assert found["left_over"] == 0


def captured(sp: bool) -> list[bool]:
    """Gradients of what was gathered: asked for with others, and of a leaf that it was made."""
    torch.manual_seed(0)
    reference = Decoder(3).double()
    model, _, _ = make(2, sp)
    batch = torch.randint(0, 64, (4, 8))
    found: list[list[Tensor]] = []
    for one in (model, reference):
        kept: list[Tensor] = []
        hook = one.layers[1].mlp.register_forward_pre_hook(lambda module, args, kept=kept: kept.append(args[0]))
        loss = loss_of(one, batch)
        hook.remove()
        weight = one.layers[0].mlp.down.weight
        grads = [torch.autograd.grad(loss, [*kept, weight], retain_graph=True)[0], *torch.autograd.grad(loss, kept)]
        for still in (one.tokens, one.layers[0].attn_norm):
            still.requires_grad_(False)
        leaf: list[Tensor] = []
        hook = one.layers[0].attn.register_forward_pre_hook(
            lambda module, args, leaf=leaf: leaf.append(args[0].requires_grad_())
        )
        loss_of(one, batch).backward()
        hook.remove()
        found.append([*grads, leaf[0].grad])
    for grad in found[0]:
        dist.all_reduce(grad)  # those of ranks are parts
    return [torch.allclose(a, b, rtol=1e-10, atol=0) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("sp", [True, False])
def test_gradients_of_what_was_gathered_are_whole_for_those_who_ask(sp):
    assert run_distributed(captured, 2, sp)[0] == [True, True, True]


def penalized(name: str) -> str:
    model, _, _ = make(2, True)
    loss = loss_of(model, torch.randint(0, 64, (4, 8)))
    (grad,) = torch.autograd.grad(loss, [model.get_parameter(name)], create_graph=True)
    try:
        (loss + grad.square().sum()).backward()
    except RuntimeError as error:
        return str(error)
    return ""


@sees(
    "the gradient of a weight's gradient lost on its way round",
    "ShardedLinear.backward",
    "if ctx.late is not None and ctx.is_plain:",
    "if ctx.late is not None:",
    case="layers.1.attn.q.weight",
)
@pytest.mark.parametrize("name", ["layers.1.attn.q.weight", "layers.2.mlp.fc2.weight"])
def test_a_penalty_on_gradients_of_linears_is_refused(name):
    assert "differentiate twice" in run_distributed(penalized, 2, name)[0]


def forgotten() -> int:
    """What a forward made goes with its loss, without the garbage collector."""
    model, _, _ = make(2, True)
    batch = torch.randint(0, 64, (4, 8))
    for _ in range(2):
        loss_of(model, batch).backward()
    gc.collect()
    gc.disable()
    loss = loss_of(model, batch)
    kept = [weakref.ref(x) for x in model.seen]
    model.seen = []
    del loss
    left = sum(ref() is not None for ref in kept)
    gc.enable()
    return left


def test_a_forward_whose_loss_is_dropped_is_dropped(found):
    assert found["forgotten"] == 0


def hooks_left() -> bool:
    """A checkpoint's hooks hold what it runs again; they go with the tensors, though the loss stays."""
    model, _, _ = make(2, True)

    def pack(x: Tensor) -> Tensor:
        return x

    pack.__module__ = "torch.utils.checkpoint"
    kept = weakref.ref(pack)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = loss_of(model, torch.randint(0, 64, (4, 8)))
    del pack
    loss.backward()
    gc.collect()
    return kept() is not None


@sees("a checkpoint is held by its norms", "keeper", "return weakref.ref(hooks[0]) if", "return hooks[0] if")
def test_a_checkpoint_goes_with_what_it_kept(found):
    assert not found["hooks_left"]


def run_alone() -> dict[str, Any]:
    return {one.__name__: one() for one in (left_over, forgotten, hooks_left)}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the functions above return on the first rank, of one start of the processes."""
    return run_distributed(run_alone, 2)[0]
