"""The proof before training: a right plan passes, and each way to spoil one is refused with the module and the ratio."""

from __future__ import annotations

import copy
import logging
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_seqpar import ParallelConfig, ParallelGroups, ProcessTopology, SeqParallelStrategy, ShardingPlan
from lightning_seqpar.inference.examples import Example
from lightning_seqpar.inference.infer import infer_plan
from lightning_seqpar.inference.model_copy import Quiet
from lightning_seqpar.inference.reduction import Reduction
from lightning_seqpar.testing import RankFailedError, run_distributed
from lightning_seqpar.verify import self_check as selfcheck
from lightning_seqpar.verify.parity import COPIES, RUNS, compare_tensors, norm_of
from lightning_seqpar.verify.self_check import CalledApartError, self_check
from tests.helpers import models, zoo
from tests.helpers.fit import fit, quiet_trainer
from tests.mutants import sees

CPU = torch.device("cpu")
Rules = list[dict[str, Any]]


def example() -> Example:
    return Example("the test's batch", "training_step", ((models.tokens(count=4).tensors[0],), 0), {})


def rules_of(kind: str) -> Rules:
    return [rule.dump() for rule in infer_plan(zoo.Zoo(kind), example(), 2).plan.rules]


def groups_of(tp: int) -> ParallelGroups:
    world = torch.distributed.get_world_size()
    return ParallelGroups(ProcessTopology.from_config(ParallelConfig(tp=tp), world), torch.distributed.get_rank())


def verdicts(cases: list[tuple[str, Rules]]) -> list[str]:
    """What the self-check says of each case; the same on every rank."""
    out = []
    for kind, rules in cases:
        plan = ShardingPlan.from_rules(rules)
        out.append("; ".join(self_check(zoo.Zoo(kind), [plan], ParallelConfig(), groups_of(2), example(), device=CPU).wrong))
    return out


def without(style: str, inside: str = "") -> Callable[[Rules], Rules]:
    def spoil(rules: Rules) -> Rules:
        kept = [rule for rule in rules if rule["style"] != style or inside not in rule["pattern"]]
        assert len(kept) < len(rules)
        return kept

    return spoil


def changed(inside: str, style: str, **options: Any) -> Callable[[Rules], Rules]:
    def spoil(rules: Rules) -> Rules:
        hit = [rule for rule in rules if rule["style"] == style and inside in rule["pattern"]]
        assert hit
        return [{**rule, **options} if rule in hit else rule for rule in rules]

    return spoil


def gathered(rules: Rules) -> Rules:
    """Encoder states gathered though they are whole."""
    return changed("cross", "gather", args=[0, 1])(without("copy")(rules))


SPOILED = [
    ("fused", changed("c_attn", "column", segments=1), "net.h.0.attn"),
    ("fused_per_head", changed("c_attn", "column", segments=3), "net.h.0.attn"),
    ("sequence_first", without("gather", "mlp"), "fc1"),
    ("bias_table", without("local_heads"), "does not run"),
    ("alibi", without("local_heads", "slopes"), "does not run"),
    ("sequence_first", without("set"), "the first wrong output is that of net.blocks.0.attn"),
    ("encoder_decoder", without("copy"), "cross"),
    ("encoder_decoder", gathered, "net.decoder.0.cross: its input has shape"),
    ("flat", changed("blocks", "blocks", dim=1), "dim 1 holds features"),
]


@sees(
    "the self-check passes everything",
    "self_check.compare_with",
    "        verdict = compare_runs(dense, sharded, record, names, groups, draws=tiles is None)\n",
    "        verdict = Verdict()\n",
)
def test_a_spoiled_plan_is_refused():
    first, other = run_distributed(verdicts, 2, [(kind, spoil(rules_of(kind))) for kind, spoil, _ in SPOILED])
    assert first == other
    for (kind, _, says), said in zip(SPOILED, first, strict=True):
        assert says in said, kind


def wrong_gradient(kind: str) -> list[str]:
    """Norms whose gradients are multiplied by the length that a rank sees; nothing in the forward changes."""
    model = zoo.Zoo(kind)

    def multiply(module: torch.nn.Module, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: grad * grad.shape[1])

    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm | zoo.RMSNorm):
            module.register_forward_hook(multiply)
    plan = ShardingPlan.from_rules(rules_of(kind))
    return self_check(model, [plan], ParallelConfig(), groups_of(2), example(), device=CPU).wrong


@sees(
    "the self-check looks at the forward alone",
    "compare_runs",
    "wrong = wrong_gradients(dense, own(), part)",
    "wrong = []",
    case="einsum",
)
@pytest.mark.parametrize("kind", ["einsum", "gqa", "encoder_decoder"])
def test_a_wrong_gradient_behind_a_right_forward_is_seen(kind):
    (said, _) = run_distributed(wrong_gradient, 2, kind)
    assert len(said) == 1
    assert "the gradient of net." in said[0]
    assert "times as large as it should be" in said[0]


class Evaluated(zoo.Zoo):
    """Its first block does something else in evaluation, where the validation step asks for it, or in a second step."""

    def __init__(self, how: str) -> None:
        super().__init__("gqa")
        base = type(self.net.h[0])

        class Block(base):
            asked, last = False, None

            def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                out = super().forward(*args, **kwargs)
                if how == "remembers" and self.training:
                    out, self.last = out if self.last is None else out + self.last.mean(1, keepdim=True), out.detach()
                if how == "remembers" or self.training or (how == "asked" and not self.asked):
                    return out
                if how == "raises":
                    raise RuntimeError("it knows no evaluation")
                return out if how == "same" else out + out.mean(1, keepdim=True)

        self.net.h[0].__class__ = Block

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.net.h[0].asked = True
        self.log("seconds", time.perf_counter())
        return self.training_step(batch, batch_idx)


def evaluated() -> dict[str, tuple[list[str], str]]:
    groups = groups_of(2)
    out = {}
    for how in ("mixes", "asked", "raises", "same", "remembers"):
        model, given = Evaluated(how), example()
        plan = ShardingPlan.from_rules(rules_of("gqa"))
        step = replace(given, method="validation_step", source="the other batch")
        found = self_check(model, [plan], ParallelConfig(), groups, given, step, device=CPU)
        out[how] = found.wrong, found.not_evaluated
    return out


@sees("evaluation not compared", "observe_evaluation", "        model.eval()\n", "        pass\n")
@sees(
    "the validation step not compared",
    "self_check",
    "    again += [] if evaluation is None else",
    "    again += [] if True else",
)
@sees(
    "what modules keep of a step not read in a later one",
    "self_check",
    "if one.training and not dense.keeps:",
    "if one.training:",
)
@sees(
    "a time that is logged taken for an error",
    "without_unstable",
    "if at not in values or is_close(values[at][0][1], values[at][1][1], limit)",
    "if True",
)
def test_what_blocks_do_in_evaluation_alone_is_seen():
    found, other = run_distributed(evaluated, 2)
    assert found == other
    (said, *_), why = found["mixes"]
    assert re.search(r"in evaluation \(training_step with the test's batch\).* wrong output is that of net\.h\.0 ", said)
    assert not why
    ((said,), _) = found["asked"]
    assert re.search(r"in evaluation \(validation_step with the other batch\).*'loss' differs.* is that of net\.h\.0 ", said)
    wrong, why = found["raises"]
    assert not wrong
    assert "RuntimeError: it knows no evaluation" in why
    assert found["same"] == ([], "")
    ((said,), why) = found["remembers"]
    assert re.search(r"in a later step, .* \(training_step with the test's batch\).* is that of net\.h\.0 ", said)
    assert not why


class SamplesAlone(zoo.Zoo):
    """Shows a sample on the first rank, in a step of the loop that it is told."""

    def __init__(self, loop: str) -> None:
        super().__init__("einsum")
        self.loop = loop

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sample("training", batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.sample("validation", batch)

    def sample(self, loop: str, batch: Any) -> None:
        if loop == self.loop and self.trainer.is_global_zero:
            with torch.no_grad():
                self.net(batch[0])


def sampled_alone() -> list[str]:
    told = []
    for loop in ("training", "validation"):
        trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2), max_steps=1)
        with pytest.raises(CalledApartError) as caught:
            trainer.fit(SamplesAlone(loop), models.loader(4), models.loader(4, count=8))
        told.append(str(caught.value))
    return told


@sees(
    "a model that some ranks call more often makes the others wait",
    "_refuse_apart",
    "if more := (here - there) or (there - here):",
    "if more := (here - here):",
)
def test_a_model_that_some_ranks_call_more_often_is_refused_before_they_wait_for_each_other():
    first, other = run_distributed(sampled_alone, 2)
    assert first == other
    for said, step in zip(
        first, ("training_step with the first training", "validation_step with the first validation"), strict=True
    ):
        assert step in said
        assert "ranks 0 and 1 do not call" in said
        assert "Call it on all ranks, not under `if trainer.is_global_zero`" in said


# ---- plans that are refused, and what a start says -------------------------------------------------------------


def run(kind: str, plan: Any = "auto") -> Any:
    return run_distributed(fit_zoo, 2, kind, plan)[0]


def fit_zoo(kind: str, plan: Any) -> list[float]:
    return fit("Zoo", {"kind": kind}, world=2, strategy={"tp": 2, "plan": plan}, steps=1).losses


@sees("a plan that was wrong in all that was tried is called right", "Prover._is_right", "return False", "return True")
def test_a_wrong_plan_is_refused_with_what_was_tried():
    with pytest.raises(RankFailedError, match=r"(?s)self_check: with the plan.* Tried: sp=False. None of that is right"):
        run("einsum", {"base": "none", "rules": without("set")(rules_of("einsum"))})


def test_whole_sequences_are_tried_for_a_wrong_plan_of_the_users():
    rules = [{key: value for key, value in rule.items() if key != "sp"} for rule in rules_of("all_inline")]
    with pytest.raises(RankFailedError, match=r"Tried: with sp=False the same plan is right"):
        run("all_inline", {"base": "none", "rules": rules})


def fit_and_listen(kind: str, folder: str) -> tuple[list[str], list[str]]:
    """The lines that a run says at its start, and its warnings."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.extend(record.getMessage().splitlines())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        patch.setenv("XDG_CACHE_HOME", folder)
        trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2), max_steps=1)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        warnings.simplefilter("always")
        trainer.fit(zoo.Zoo(kind), models.loader(4))
        logger.removeHandler(handler)
    return told, [str(one.message) for one in caught if "lightning_seqpar" in str(one.message)]


def starts(kinds: list[str], folder: str) -> list[tuple[list[str], list[str]]]:
    return [fit_and_listen(kind, folder) for kind in kinds]


@sees(
    "coverage: what the self-check found on shards is not the reason",
    "Prover._check_or_widen",
    "self._why_wide = _cause(error)",
    "pass",
)
@sees("a plan's rules are in no file", "ModelSetup._log_summary", 'write_plan(plans, summarize(*about)) if plans else ""', '""')
def test_a_start_says_why_what_is_whole_is_whole_and_where_the_rules_are(tmp_path):
    """Attention that can't be split, and a shift of the sequence, which only the self-check finds wrong on shards."""
    (split, shifted), _ = run_distributed(starts, 2, ["hard_coded", "shifted"], str(tmp_path))
    for told, warned in (split, shifted):
        assert any("self-check: passed" in line for line in told)
        assert any("/plans/" in line for line in told)
        assert len(warned) == (told is shifted[0])
    assert any("whole: net.h.*.attn (4 tensors, 2,048 parameters): net.h.0.attn.out: with" in line for line in split[0])
    assert any("; off: sp (net.h.*: on shards the self-check found: the loss differs" in line for line in shifted[0])


@sees("small gradients may be twice too large", "parity:compare_tensors", "own > OWN_LIMIT and", "False and", case="True")
@pytest.mark.parametrize("narrow", [True, False])
def test_a_small_gradient_that_is_counted_twice_is_seen(narrow):
    small = torch.full((3,), 1e-6 if narrow else 1e-10, dtype=torch.float64)
    grads = {"large": torch.ones(4, dtype=torch.float64), "small": small}

    def wrong(whole: Any, sharded: Any) -> list[str]:
        for limits in (COPIES[narrow], RUNS[narrow]):
            row, found = compare_tensors("gradients", whole, sharded.items(), limits, norm_of(whole))
            assert row.ok is not bool(found)
        return [one.name for one in found]

    assert wrong(grads, grads) == []
    assert wrong(grads, {**grads, "small": 2 * small}) == ["small"]
    sparse = {**grads, "large": grads["large"].to_sparse()}
    assert wrong(sparse, grads) == []
    assert wrong(sparse, {**sparse, "large": 2 * sparse["large"]}) == ["large"]
    assert wrong(grads, {**grads, "small": small * (1 + 1e-3)}) == []


# ---- reduced copies --------------------------------------------------------------------------------------------


class Kinds(zoo.Zoo):
    """Six blocks of two kinds in turn: with grouped heads, and with a norm on each head."""

    def __init__(self) -> None:
        super().__init__("gqa")
        normed = [zoo.PreNorm(32, zoo.Attention(32, 8, 8, "head"), zoo.FeedForward(32, 48)) for _ in range(3)]
        grouped = [zoo.BLOCKS["gqa"]() for _ in range(3)]
        self.net.h = torch.nn.ModuleList(block for pair in zip(grouped, normed, strict=True) for block in pair)
        zoo.perturb(self)


def verdicts_of_kinds(narrowed: list[tuple[str, str]]) -> list[str]:
    """What a reduced copy of :class:`Kinds` shows, with its plan, and where a style's rule holds for some blocks only."""
    model, tp = Kinds(), 2
    groups = groups_of(tp)
    small = example().reduced(Reduction(skips_repeats=True, vocabularies={31: 13}, lengths=(9, 7), samples=2))
    rules = [rule.dump() for rule in infer_plan(model, example(), tp).plan.rules]
    out = []
    before, stream = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    for style, blocks in narrowed:
        changed = [
            {**rule, "pattern": rule["pattern"].replace("*", blocks)} if rule["style"] == style else rule for rule in rules
        ]
        assert changed != rules or blocks == "*"
        plan = ShardingPlan.from_rules(changed)
        out.append("; ".join(self_check(model, [plan], ParallelConfig(), groups, small, device=CPU).wrong))
    # The model and the random streams stay as they were.
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(parameter.grad is None for parameter in model.parameters())
    return out


def test_a_reduced_copy_shows_what_is_wrong_in_one_kind_of_block_or_in_one_block():
    narrowed = [("set", "*"), ("set", "{0,2,4}"), ("set", "{1,3,5}"), ("set", "{0,1,2,3,4}"), ("gather", "{0,1,2,3,4}")]
    (right, *wrong), _ = run_distributed(verdicts_of_kinds, 2, narrowed)
    assert right == ""
    assert all(wrong), wrong


# ---- examples --------------------------------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset):
    """Can be read once."""

    def __init__(self) -> None:
        self.left = iter(models.tokens(count=32))

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.left)


class WithExample(zoo.Zoo):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.example_input_array = torch.randint(31, (2, 9))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net(ids)


def fit_streams() -> list[str | int]:
    found: list[str | int] = []
    for model in (zoo.Zoo, WithExample):
        trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2), max_steps=2)
        try:
            trainer.fit(model("einsum"), DataLoader(Stream(), batch_size=8))
            found.append(trainer.global_step)
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_stream_asks_for_an_example_or_takes_the_models_own():
    for said, *steps in run_distributed(fit_streams, 2):
        assert "is a stream that can be read once only; set example_input_array" in said
        assert steps == [2]


class Transfers(zoo.Zoo):
    """Makes tokens of what the loader gives, on the way to the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (batch[0].long(),)


def fit_counted() -> tuple[int, torch.Tensor]:
    """How often the loader's samples were read, and what was drawn."""
    L.seed_everything(3, verbose=False)
    data = Counted()
    trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2), max_steps=1)
    trainer.fit(Transfers("einsum"), DataLoader(data, batch_size=4, shuffle=True))
    return data.read, torch.rand(2)


class Counted(TensorDataset):
    read = 0

    def __init__(self) -> None:
        super().__init__(models.tokens(count=8).tensors[0].to(torch.uint8))

    def __getitem__(self, index: Any) -> Any:
        self.read += 1
        return super().__getitem__(index)


def test_a_batch_is_peeked_on_the_first_rank_through_the_transfer_hooks_and_leaves_the_streams():
    (first, drawn), (other, same) = run_distributed(fit_counted, 2)
    assert (first, other) == (8, 4)
    assert torch.equal(drawn, same)


def check_with_ranks_that_fail(failing: list[int], patience: float) -> list[str]:
    selfcheck.GRACE = timedelta(seconds=patience)

    def fail_on_a_shard(module: torch.nn.Module, args: Any) -> None:
        if torch.distributed.get_rank() in failing and args[0].shape[1] < 10:
            raise RuntimeError("of some ranks")

    model = zoo.Zoo("gqa")
    plan = infer_plan(model, example(), 2).plan
    model.get_submodule("net.h.1.attn").register_forward_pre_hook(fail_on_a_shard)
    return self_check(model, [plan], ParallelConfig(), groups_of(2), example(), device=CPU).wrong


@sees(
    "a replica whose self-check fails goes on alone",
    "_share_verdict",
    "groups[tuple(sorted(groups.topology.axes))]",
    'groups["tp"]',
)
def test_a_replica_that_fails_alone_does_not_meet_the_others_in_another_collective():
    with pytest.raises(RankFailedError) as caught:
        run_distributed(check_with_ranks_that_fail, 4, [0, 1], 2.0)
    said = r"--- rank [01]: FailedAloneError: self_check: .* RuntimeError: of some ranks .* other ranks \(.*2, 3\) go on"
    assert re.search(said, str(caught.value))  # the first of them to give up ends the run


@sees("a rank that fails alone in the self-check waits for ever", "_share_verdict", "    _await_others(failure, world)\n", "")
def test_a_rank_that_fails_alone_does_not_wait_for_the_others():
    with pytest.raises(RankFailedError) as caught:
        run_distributed(check_with_ranks_that_fail, 2, [1], 2.0)
    at = r"\(test_selfcheck\.py, line \d+: .*\)"
    said = rf"rank 1, which raised RuntimeError: of some ranks {at}, while other ranks \(0\) go on and wait for it"
    assert re.search(rf"--- rank 1: FailedAloneError: self_check: the sharded model does not run on {said}", str(caught.value))


def test_ranks_that_all_fail_say_so_together():
    (first,), (second,) = run_distributed(check_with_ranks_that_fail, 2, [0, 1], 600.0)
    assert first == second
    assert first.startswith("it does not run: RuntimeError: of some ranks (test_selfcheck.py, line ")


@sees(
    "a forward's outputs weighed by what is drawn",
    "project",
    "    weights = (places * 12.9898).sin().view(tensor.shape)\n",
    "    weights = torch.randn(tensor.shape, dtype=torch.float64)\n",
)
def test_what_a_forward_gives_is_weighed_where_draws_are_kept_quiet():
    """Weights that were drawn would be zeros there, and every gradient of the check with them."""
    out = torch.ones(3, 4, requires_grad=True)
    given, forward = torch.nn.Identity(), Example("the test's input", "forward", (out,), {})
    with Quiet(draws=False):
        loss = forward.run(given)
    loss.backward()
    assert out.grad.abs().min() > 0
    assert len(out.grad.unique()) == 12
    assert torch.equal(loss, forward.run(given))
