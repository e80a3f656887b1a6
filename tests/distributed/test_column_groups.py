"""Columns that share a gather, and rows: the same gradients whatever is done with the graph, and products under collectives."""

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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_seqpar import ParallelGroups, ProcessTopology
from lightning_seqpar.inference.infer import infer_plan
from lightning_seqpar.parallel.apply import parallelize
from lightning_seqpar.parallel.grad_sync import GradSync
from lightning_seqpar.plan.sharding_plan import resolve_plans
from lightning_seqpar.region.products import Products, Tokens
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import gather_grads
from tests.helpers.models import NoGradient
from tests.helpers.zoo import FeedForward
from tests.mutants import sees

ROUNDS = 4


class Within(peers.Mlp):
    """What is between its linears, and all of it, is run in whatever way is asked for."""

    run: Callable[..., Tensor] = staticmethod(lambda made, x: made(x))
    run_all: Callable[..., Tensor] = staticmethod(lambda whole, x: whole(x))

    def made(self, x: Tensor) -> Tensor:
        return nn.functional.silu(self.gate(x)) * self.up(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.run_all(lambda x: self.down(self.run(self.made, x)), x)


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


def recomputed_with_its_row(model: Decoder, batch: Tensor, at: int) -> None:
    """The row is run again, in odd rounds without the columns, and what is behind it is not."""
    mlp = model.layers[0].mlp
    again = functools.partial(checkpoint, use_reentrant=False)
    mlp.run_all = lambda whole, x: (again(mlp.down, mlp.made(x)) if at % 2 else again(whole, x)).sin()
    loss_of(model, batch).backward()
    del mlp.run_all


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

    hooks = [one.register_forward_pre_hook(scale) for one in (model.layers[1].attn, model.layers[2].mlp.fc1)]
    loss_of(model, batch).backward()
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


def column_otherwise(model: Decoder, batch: Tensor, at: int) -> None:
    """A column is called twice, without gradients, on values in place, or with a weight that was changed in front of it."""

    def made(mlp: Any, x: Tensor) -> Tensor:
        if at == 0:
            return nn.functional.silu(mlp.gate(x)) * mlp.up(x) + mlp.gate(x).sin()
        if at == 1:
            with torch.no_grad():
                gate = mlp.gate(x)
            return gate * mlp.up(x)
        if at == 2:
            return nn.functional.silu(mlp.gate(x), inplace=True) * mlp.up(x).relu_() * x.mT.mT.mean(-1, keepdim=True)
        mlp.up.weight.data = mlp.up.weight.data * 2
        return mlp.gate(x) * mlp.up(x)

    mlp = model.layers[0].mlp
    mlp.made = functools.partial(made, mlp)
    loss_of(model, batch).backward()
    del mlp.made
    if at == 3:
        mlp.up.weight.data = mlp.up.weight.data / 2


def watched_columns(model: Decoder, batch: Tensor, at: int) -> list[Any]:
    """Hooks of columns: one in front that changes nothing, and one on the gradient of what a column made."""
    mlp = model.layers[at % 2].mlp
    hooks = [
        mlp.up.register_forward_pre_hook(lambda module, args: None),
        mlp.gate.register_forward_hook(lambda module, args, out: out.register_hook(lambda grad: grad / 2) and None),
    ]
    loss_of(model, batch).backward()
    return hooks


def bias_set(model: Decoder, batch: Tensor, at: int) -> list[Any]:
    """In front of the column that adds it, and behind the gather."""

    def shift(module: Any, args: Any) -> None:
        module.fc1.bias.data = module.fc1.bias.data + 1

    mlp = model.layers[-1].mlp
    before = mlp.fc1.bias.data.clone()
    hook = mlp.register_forward_pre_hook(shift)
    loss_of(model, batch).backward()
    mlp.fc1.bias.data = before
    return [hook]


def hooked_early(model: Decoder, batch: Tensor, at: int) -> list[Any]:
    """On the gradient of what was gathered, where one column of two joins."""
    mlp = model.layers[1].mlp
    hooks = [
        mlp.register_forward_pre_hook(lambda module, args: args[0].register_hook(lambda grad: grad / 2) and None),
        mlp.up.register_forward_pre_hook(lambda module, args: None),
    ]
    loss_of(model, batch).backward()
    return hooks


USES = {
    use.__name__: use
    for use in (
        plain, micro_batches, detached_inside, no_grad_below, other_orders, recomputed,
        recomputed_inside, recomputed_with_its_row, recomputed_twice, watched, retained, two_forwards, some_then_all, hooked,
        backward_in_a_hook, hooked_inside, flattened, column_beside, cut_behind_columns, cut_behind_a_part, read_beside,
        given_up, column_otherwise, watched_columns, bias_set, hooked_early,
    )
}  # fmt: skip


def make(tp: int, sp: bool, regather: bool = True, recompute: Any = "none") -> tuple[Decoder, Any, ParallelGroups]:
    groups = ParallelGroups(ProcessTopology(["dp", "tp"], [dist.get_world_size() // tp, tp]), dist.get_rank())
    torch.manual_seed(0)
    model = Decoder(3).double()
    plans = resolve_plans("auto", model, lambda: infer_plan(model, (torch.zeros(4, 8, dtype=torch.long),), tp).plan)
    record = parallelize(model, plans, groups, sp=sp, regather=regather, recompute=recompute)
    return model, record, groups


SHORT = ("watched", "flattened", "cut_behind_columns", "cut_behind_a_part")
FEW = ("plain", "micro_batches", "detached_inside", "other_orders", "recomputed", "two_forwards")


def check_uses(
    tp: int, sp: bool, names: Sequence[str], regather: bool = True, recompute: str = "none", rounds: int = ROUNDS
) -> None:
    for name in names:
        use = USES[name]
        model, record, groups = make(tp, sp, regather, recompute)
        torch.manual_seed(0)
        reference = Decoder(3).double()
        sync = GradSync(record.layout, groups)
        for at in range(rounds):
            round_of(use, at, model, record, sync, reference)


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


def compare(what: str, found: dict[str, Tensor | None], reference: nn.Module) -> None:
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    norm = torch.stack([grad.norm() for grad in expected.values() if grad is not None]).norm()
    for name, grad in expected.items():
        own = found[name]
        assert (own is None) == (grad is None), f"{what}: {name} has {'no' if own is None else 'a'} gradient"
        if grad is not None:
            assert (own - grad).norm() <= 1e-12 * norm, f"{what}: {name} is off by {(own - grad).norm() / norm:.1e}"


@sees(
    "the columns' products left out of the gradient of their input",
    "_input_grad",
    "return total.addmm_(rows, matrix) if own else torch.addmm(total, rows, matrix)",
    "return total",
)
@sees(
    "zeros where the output of a column has no gradient", "Products.forward", "        ctx.set_materialize_grads(False)\n", ""
)
@sees("zeros where the output of a row has no gradient", "Row.forward", "        ctx.set_materialize_grads(False)\n", "")
@sees("what was made with another bias is taken", "take_made", "or parameters != identities(column._parameters.values())", "")
@sees(
    "a column that did not join counts as one that read",
    "ColumnGroup.close",
    "len(left) < self._joined:",
    "len(left) < len(self._columns):",
)
@sees("what was made of a tensor is taken though its gradient is changed", "take_made", "grad_hooks(x) is not None", "False")
@pytest.mark.more
def test_gradients_are_those_of_one_process_whatever_is_done():
    run_distributed(check_uses, 2, 2, True, list(USES))


@pytest.mark.matrix
@pytest.mark.parametrize(("world", "tp", "sp"), [(4, 2, True), (4, 4, True), (2, 2, False)])
def test_they_are_on_other_ranks_and_without_shards(world, tp, sp):
    run_distributed(check_uses, world, tp, sp, FEW if sp else list(USES))


@sees("a row in a checkpoint of the user's ends the span around it", "hold", " or frame.span[2] != saved_tensor_hooks()", "")
@pytest.mark.more
def test_they_are_where_activations_are_made_again():
    run_distributed(check_uses, 2, 2, True, list(USES), True, "activations", 2, timeout=200.0)


@sees(
    "an activation in a checkpoint under somebody's hooks needs no gradient",
    "_settle",
    "value._local = value._local.detach().requires_grad_()",
    "pass",
    case="True",
)
@pytest.mark.more
@pytest.mark.parametrize("sp", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_they_are_where_the_whole_is_kept(sp):
    run_distributed(check_uses, 2, 2, sp, (*FEW, *SHORT) if sp else FEW, False)


@sees("a gradient of others' is changed in place", "Products.backward", "own = False  #", "own = True  #")
def test_the_gradient_of_other_readers_stays_as_it_is():
    groups = ParallelGroups.silent(ProcessTopology(["dp", "tp"], [1, 2]))
    x, weight = torch.randn(2, 3, 4, requires_grad=True), nn.Parameter(torch.randn(5, 4))
    whole, out = Products.applied((Tokens(groups["tp"], 1, sp=False), None, (False,), None), x, weight, None)
    given = torch.ones_like(whole)
    torch.autograd.backward([whole, out], [given, torch.ones_like(out)])
    assert torch.equal(given, torch.ones_like(given))


class Order(TorchDispatchMode):
    """Notes products of matrices, exchanges as they start, and sums of what they brought."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if name in ("mm", "addmm_", "alltoall_base_", "cat", "add_"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def order() -> list[str]:
    """Of the backward of an MLP with two columns."""
    model, _, _ = make(2, True)
    loss = loss_of(model, torch.randint(0, 64, (4, 8)))
    with Order() as noted:
        loss.backward()
    return noted.seen


@sees(
    "the sum is waited for where it starts",
    "Products.backward",
    "pending = pending if tokens is None else tokens.start_sum(pending)",
    "pending = pending if tokens is None else tokens.start_sum(pending, async_op=False)",
)
@sees(
    "the input is gathered again when it is needed",
    "Products.backward",
    "again = tokens.start_gather(again)",
    "again = tokens.start_gather(again, async_op=False)",
)
def test_products_run_under_collectives(found):
    exchange, gathered, summed = "alltoall_base_", "cat", "add_"
    under = [exchange, "mm", "addmm_", exchange, gathered, "mm", "mm", summed]
    seen = found["order"]
    assert any(seen[at : at + len(under)] == under for at in range(len(seen)))


def captured(sp: bool) -> list[bool]:
    """The gradient of what was gathered and made a leaf."""
    torch.manual_seed(0)
    reference = Decoder(3).double()
    model, _, _ = make(2, sp)
    batch = torch.randint(0, 64, (4, 8))
    found: list[list[Tensor]] = []
    for one in (model, reference):
        for still in (one.tokens, one.layers[0].attn_norm):
            still.requires_grad_(False)
        leaf: list[Tensor] = []
        hook = one.layers[0].attn.register_forward_pre_hook(
            lambda module, args, leaf=leaf: leaf.append(args[0].requires_grad_())
        )
        loss_of(one, batch).backward()
        hook.remove()
        found.append([leaf[0].grad])
    for grad in found[0]:
        dist.all_reduce(grad)  # those of ranks are parts
    return [torch.allclose(a, b, rtol=1e-10, atol=0) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("sp", [True, False])
def test_what_was_gathered_may_be_made_a_leaf(sp):
    assert run_distributed(captured, 2, sp)[0] == [True]


def penalized(name: str) -> str:
    model, _, _ = make(2, True)
    loss = loss_of(model, torch.randint(0, 64, (4, 8)))
    (grad,) = torch.autograd.grad(loss, [model.get_parameter(name)], create_graph=True)
    try:
        (loss + grad.square().sum()).backward()
    except RuntimeError as error:
        return str(error)
    return ""


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


def hooked_late() -> str:
    model, _, _ = make(2, True)
    model.layers[2].mlp.fc1.register_forward_hook(lambda module, args, out: args[0].register_hook(torch.neg) and None)
    try:
        loss_of(model, torch.randint(0, 64, (4, 8)))
    except RuntimeError as error:
        return str(error)
    return ""


@sees(
    "a hook that would see a part of the gradient is let through",
    "ColumnGroup.close",
    "if grad_hooks(whole) is not None and len(left) < self._joined:",
    "if False:",
)
def test_a_hook_that_would_not_see_the_columns_gradients_is_refused(found):
    assert "layers.2.mlp: a hook was registered on the gradient of its input" in found["hooked_late"]


def in_place() -> list[int]:
    """How often an MLP's column runs in a forward and a backward, in two steps, where its activation is made in place."""
    model, _, _ = make(2, True, True, "activations")
    mlp, runs = model.layers[0].mlp, []
    mlp.made = lambda x: nn.functional.silu(mlp.gate(x), inplace=True) * mlp.up(x)
    mlp.gate.register_forward_hook(lambda *_: runs.append(1) and None)
    counts = []
    for _ in range(2):
        try:
            loss_of(model, torch.randint(0, 64, (4, 8))).backward()
        except RuntimeError:  # what is kept was changed
            break
        counts.append(len(runs))
        runs.clear()
    return counts


@sees(
    "activations made in place run again for ever",
    "RecomputedSpan.__call__",
    "self._is_plain, self._has_run = changes, True",
    "self._has_run = True",
)
def test_an_activation_that_is_made_in_place_runs_once_from_its_second_call_on(found):
    assert found["in_place"] == [2, 1]


def run_alone() -> dict[str, Any]:
    return {one.__name__: one() for one in (order, forgotten, hooked_late, in_place)}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the functions above return on the first rank, of one start of the processes."""
    return run_distributed(run_alone, 2)[0]
