"""From a config's ``plan`` to plans that are proved: families, the user's rules, inference, and the self-check."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_seqpar.config import ParallelConfig, PlanSpec
from lightning_seqpar.distributed.rendezvous import Phases
from lightning_seqpar.inference.dataflow import CantInferError, NothingToSplitError
from lightning_seqpar.inference.examples import Example, ExampleSearch, FoundExample
from lightning_seqpar.inference.infer import PROPOSAL, infer_blocks, infer_plan
from lightning_seqpar.inference.pipeline_cut import find_cut, leaves_blocks, stacks_of
from lightning_seqpar.inference.trainer_view import NoExampleError, OneRankOnly, PlainBackwardError, attach_view
from lightning_seqpar.layout.linear_kind import known_limits
from lightning_seqpar.layout.module_names import likely_blocks
from lightning_seqpar.pipeline.cut import Cut
from lightning_seqpar.plan.sharding_plan import ShardingPlan, resolve_plans
from lightning_seqpar.plan.vocabulary import SOURCE, VOCAB_OFF, find_vocabulary, not_proved, with_vocabulary, without_vocabulary
from lightning_seqpar.releases import pl
from lightning_seqpar.styles.blocks import BlocksRule
from lightning_seqpar.topology.process_groups import ParallelGroups
from lightning_seqpar.verify.coverage import Explanations
from lightning_seqpar.verify.run_comparison import Verdict
from lightning_seqpar.verify.self_check import SelfCheckError, self_check, stage_check

_WAYS_OUT = (
    "set example_input_array on the module (a tensor, tuple or dict that its forward takes), or self_check=False to train "
    "unproved with a plan of your own"
)

_MOST_PARTS = 4  # parts of the blocks that are tried whole, one after the other, where a plan that was found is wrong


@dataclass
class Proved:
    """What :meth:`Prover.prove` returns."""

    plans: list[ShardingPlan] = field(default_factory=list)  # the plans to apply, in order
    lines: list[str] = field(default_factory=list)  # for the summary: what was decided and proved, a sentence each
    known: Explanations = field(default_factory=Explanations)  # why what is not sharded is whole
    frozen: str = ""  # why the proof holds only while frozen parameters stay so; empty if it holds when they thaw too


class Prover:
    """Finds and proves the plans of one model; collective over the world, whose first rank seeks an example and infers for all."""

    def __init__(
        self,
        module: pl.LightningModule,
        trainer: pl.Trainer | None,
        config: ParallelConfig,
        groups: ParallelGroups,
        device: torch.device,
        phases: Phases | None = None,
        called_with: tuple[str, Any, Any] | None = None,
    ) -> None:
        self._phases = phases or Phases(shows=False)
        self._module, self._trainer, self._config, self._groups, self._device = module, trainer, config, groups, device
        self._world = groups[tuple(sorted(groups.topology.axes))]
        self._tp = groups.size("tp")
        self._prepare = functools.partial(attach_view, trainer=trainer)  # of a copy, before it runs
        self._search = ExampleSearch(module, trainer, groups.size(groups.replica_axes), device, called_with)
        self._found: FoundExample | None = None  # what the first rank's search found, once every rank has it
        self._reasons: list[str] = []
        self._vocabulary: list[str] = []  # lines on what of it is sharded
        self._beside: Sequence[ShardingPlan] = ()  # shipped plans, beside which the rest is inferred
        self._known = Explanations()
        self._parts: list[dict[str, Any]] = []  # rules by which a part of the blocks is computed whole
        self._draws_differ = False  # whether a self-check found random numbers of the user's own code wrong
        self._frozen = ""  # why the proof holds only while frozen parameters stay so
        self._not_evaluated = ""  # why the last self-check did not compare evaluation
        self._why_wide = ""  # what the self-check found wrong with the plan that shards more

    def prove(self) -> Proved:
        """Find the plans for the model and prove them; the ValueError of a model without a plan says what to write."""
        out, started = Proved(), time.monotonic()
        try:
            with self._phases.phase("finding a plan"):
                if isinstance(self._config.plan, PlanSpec):
                    ShardingPlan.from_rules(self._config.plan.rules, source="your plan").match(self._module)
                out.plans = resolve_plans(self._config.plan, self._module, self._infer, self._infer_rest)
            for plan in out.plans:
                plan.match(self._module)
            self._add_vocabulary(out)
            self._prove(out, started)
        except ValueError as error:
            if limits := known_limits(self._module):
                raise type(error)(f"{error}\nPEFT with tp={self._tp}: {'; '.join(limits)}") from None
            raise
        out.known = self._known
        reasons: list[str] = []
        if inferred := _inferred(out):
            rules = inferred[0].to_yaml().splitlines()[1:]
            reasons = [f"why: {one}" for one in self._reasons] + [f"rule: {one.removeprefix('- ')}" for one in rules]
        out.lines[:0] = reasons + self._vocabulary
        return out

    def find_unsharded(self) -> list[ShardingPlan]:
        """Plans that name the blocks of a model of which nothing is sharded (tp 1), unproved. Collective over the world."""
        spec, own = self._config.plan, self._own_rules
        config = self._config
        needs_linears = config.recompute == "selective" or config.tile_mlp is not None or config.float8 != "none"
        if own is not None and not needs_linears and any(isinstance(r, BlocksRule) for r in own.rules):
            own.match(self._module)
            return [own]

        def infer() -> ShardingPlan:
            example, _, failures, _ = self._example()
            if example is None:
                raise CantInferError(f"to find them an example input is needed: {'; '.join(dict.fromkeys(failures))}")
            # With linears the plan that two ranks would have.
            found = self._on_copy(infer_plan, 2, own).plan if needs_linears else self._on_copy(infer_blocks)
            return cast("ShardingPlan", found)

        with self._phases.phase("finding the blocks"):
            try:
                plans = resolve_plans(spec, self._module, infer)
                if self._config.pp > 1 and not isinstance(spec, PlanSpec) and leaves_blocks(self._module, plans):
                    plans = [infer()]  # a shipped plan knows one stack of a model that has several
                return plans
            except ValueError as error:
                fields = {"cp", "pp", "tile_mlp", "loss_chunk", "recompute", "offload", "float8"}
                given = self._config.model_dump(include=fields, exclude_defaults=True)
                wanted = [f"{name}={value!r}" for name, value in given.items()]
                instead = f"leave {'them' if len(given) > 1 else next(iter(given))} out"
                if given.keys() == {"recompute"}:
                    instead += " (activation checkpointing inside the model works)"
                pattern = (likely_blocks(self._module) or ["model.layers.*"])[0]
                raise ValueError(
                    f"{' and '.join(wanted)} with tp=1: the blocks are found as for a larger tp, and {error}. Name them by "
                    f"a rule, plan={{'rules': [{{pattern: '{pattern}', style: blocks}}]}}, or {instead}"
                ) from None

    def find_cut(self, plans: Sequence[ShardingPlan]) -> Cut:
        """Where the model is cut into the stages of the pipeline. Collective over the world."""
        example, _, failures, _ = self._example()
        if example is None:
            raise ValueError(f"pp={self._config.pp}: to cut the model an example input is needed: {'; '.join(failures)}")
        return cast("Cut", self._on_copy(find_cut, stacks_of(self._module, plans), self._config))

    def check_stages(self, plans: Sequence[ShardingPlan], cut: Cut) -> list[str]:
        """Prove that the model computes in stages what it computes whole, or raise SelfCheckError. Collective over the world."""
        config, started = self._config, time.monotonic()
        if not config.self_check:
            return []
        example = self._checked
        with self._phases.phase("proving the stages"):
            verdict = self._compare(
                lambda groups, **options: stage_check(self._module, plans, cut, config, groups, example, **options)
            )
        if verdict.wrong:
            raise SelfCheckError(
                f"self_check: in {config.pp} stages the model does not do what it does whole, so nothing is trained "
                f"({example.method} with {example.source}): {'; '.join(verdict.wrong)}. What "
                "blocks make must go to later ones as their activation; use pp=1 for a model in which it goes other ways"
            )
        return [f"self-check of the stages: passed, with {example.source}, in {time.monotonic() - started:.1f} s"]

    def prove_unsharded(self) -> Proved:
        """Find the blocks of a model of which tp shards nothing, and prove that they are right on parts (cp) and in tiles."""
        started, out = time.monotonic(), Proved(self.find_unsharded())
        self._prove(out, started)
        return out

    def _prove(self, out: Proved, started: float) -> None:
        """Run the self-check on the plans of ``out``, unless it is off; plans that pass may replace them, and it gets a line."""
        if not self._config.self_check:
            rank_zero_warn(
                "lightning_seqpar: self_check=False: nothing proves the plan, and a wrong rule (a head count not divided, "
                "segments left out, a block that mixes positions) can train without an error"
            )
            return
        with self._phases.phase("proving the plan"):
            passed = self._check_thawed(out)
        out.frozen = self._frozen
        self._explain_widened(_inferred(out))
        if passed:
            line = f"self-check: passed, with {self._checked.source}, in {time.monotonic() - started:.1f} s"
            if self._not_evaluated:
                line += f", but not in evaluation, which does not run whole: {self._not_evaluated}"
            out.lines.append(line)

    @property
    def _own_rules(self) -> ShardingPlan | None:
        spec = self._config.plan
        return ShardingPlan.from_rules(spec.rules) if isinstance(spec, PlanSpec) else None

    def _from_first_rank(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` on the world's first rank: its result, or its error, on every rank; collective over it."""
        box: list[Any] = [None, None, CantInferError]  # the result; the error's text, and as what it is raised
        if dist.get_rank(self._world) == 0:
            try:
                with OneRankOnly():  # type: ignore[no-untyped-call]
                    box[0] = work()
            except PlainBackwardError as error:
                box[1:] = str(error), ValueError
            except (CantInferError, NoExampleError) as error:
                box[1] = str(error)
                box[2] = NothingToSplitError if isinstance(error, NothingToSplitError) else CantInferError
            except Exception as error:  # whatever it is: the other ranks wait for an answer
                box[1] = f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(box, src=dist.get_process_group_ranks(self._world)[0], group=self._world)
        if box[1] is not None:
            raise box[2](box[1])
        return box[0]

    def _on_copy(self, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What ``work`` finds on a copy of the model with the example, on the first rank; collective over the world."""
        options |= {"dtype": self._example().dtype, "prepare": self._prepare}
        return self._from_first_rank(functools.partial(work, self._module, self._checked, *args, **options))

    def _example(self) -> FoundExample:
        """What the first rank's search for an example finds, on every rank; collective over the world at its first call."""
        if self._found is None:
            self._found = self._from_first_rank(self._search.run)
        assert self._found is not None
        return self._found

    @property
    def _checked(self) -> Example:
        return cast("Example", self._example().example)

    def _infer_rest(self, beside: Sequence[ShardingPlan]) -> ShardingPlan | None:
        """Infer a plan for what the shipped plans leave whole, or None if it stays so; collective over the world."""
        self._beside = beside
        try:
            if not self._config.self_check:
                raise ValueError("with self_check=False nothing would prove a plan there")
            if self._example().example is None:
                raise ValueError("to infer a plan there, an example input is needed")
            return self._infer()
        except ValueError as error:
            self._known.rest = str(error)
            return None

    def _infer(self, *, sums: bool = True) -> ShardingPlan:
        """Infer a plan on the first rank; without ``sums`` experts are reduced one by one. Collective over the world."""
        name = type(self._module).__name__
        example, _, failures, _ = self._example()
        if example is None:
            raise ValueError(
                f"plan='auto': no shipped plan fits {name}, and to infer one an example input is needed: "
                f"{'; '.join(dict.fromkeys(failures))}. Set example_input_array on the module (a tensor, tuple or dict that its "
                "forward takes), or write a plan (plan='my_plan.yaml' or plan={'base': 'none', 'rules': [...]}; docs/your_model.md)"
            )
        try:
            inferred = self._on_copy(infer_plan, self._tp, self._own_rules, beside=self._beside, sums=sums)
        except CantInferError as error:
            if self._beside:
                raise
            if isinstance(error, NothingToSplitError):
                raise ValueError(f"plan='auto': no shipped plan fits {name}, and none can be made. {error}") from None
            why, proposes, rules = str(error).partition(PROPOSAL)
            raise ValueError(
                f"plan='auto': no shipped plan fits {name}, and inference stops at\n  {why}\nRules of yours are kept, and the "
                "others found as before (plan={'rules': [...]}); a whole plan is plan='my_plan.yaml' or plan={'base': 'none', "
                f"'rules': [...]}} (docs/your_model.md){proposes}{rules}"
            ) from None
        self._reasons, self._parts = inferred.reasons, inferred.parts
        self._known.whole, self._known.no_sp = inferred.whole, inferred.no_sp
        return cast("ShardingPlan", inferred.plan)

    def _check_thawed(self, out: Proved) -> bool:
        """:meth:`_check_or_widen` on copies whose parameters all train; if nothing passes that, on copies frozen like the model."""
        example, _, failures, _ = self._example()
        if example is not None and example.frozen:
            self._frozen = failures[0] if failures else "its step runs on no other copy"
        try:
            return self._check_or_widen(out)
        except ValueError as error:
            if example is None or example.frozen or all(p.requires_grad for p in self._module.parameters()):
                raise
            self._found = self._example()._replace(example=replace(example, frozen=True))
            try:
                passed = self._check_vocabulary(out)
            except ValueError:
                raise error from None
            self._frozen = _cause(error)
            return passed

    def _check_or_widen(self, out: Proved) -> bool:
        """Run the self-check; where the plans of ``out`` fail it, try forms of the inferred ones in which less is sharded."""
        try:
            return self._check_vocabulary(out)
        except ValueError as error:
            narrow, inferred, tried = out.plans, _inferred(out), []
            for what, variant in self._variants(inferred):
                tried.append(what)
                try:
                    out.plans = [*variant(), *(plan for plan in narrow if plan not in inferred)]
                    passed = self._check_vocabulary(out)
                except ValueError:
                    continue  # the error of the plan on shards is the one that is raised
                self._why_wide = _cause(error)
                return passed
            out.plans = narrow
            if not inferred and self._config.sp:  # rules of the user's or shipped ones, which are theirs to change
                tried.append("sp=False")
                if self._is_right([plan.without_sp() for plan in narrow]):
                    raise type(error)(f"{error}. Tried: with sp=False the same plan is right") from None
            if tried and (inferred or isinstance(error, SelfCheckError)):
                raise type(error)(f"{error}. Tried: {'; '.join(tried)}. None of that is right") from None
            raise error from None

    def _is_right(self, plans: list[ShardingPlan]) -> bool:
        try:
            return self._check(Proved(plans))
        except ValueError:
            return False

    def _variants(self, inferred: Sequence[ShardingPlan]) -> Iterator[tuple[str, Callable[[], list[ShardingPlan]]]]:
        """Forms of the inferred plans in which less is sharded, with their names: whole sequences, single experts, a part whole."""
        if not inferred:
            return
        if self._config.sp:
            yield "sp=False", lambda: [plan.without_sp() for plan in inferred]
        if any(rule.style == "reduce" for plan in inferred for rule in plan.rules):
            yield "each expert reduced by itself", lambda: [self._infer(sums=False).without_sp()]
        # Own code that draws random numbers in a way that no rule mends would only be computed whole: the user can do better.
        for part in () if self._draws_differ else self._parts[:_MOST_PARTS]:
            rules = ShardingPlan.from_rules([part]).rules
            fewer = [replace(plan, rules=(*plan.rules, *rules)) for plan in inferred]
            yield f"{part['pattern']} whole", functools.partial(list, fewer)
            if self._config.sp:
                wide = [plan.without_sp() for plan in fewer]
                yield f"{part['pattern']} whole with sp=False", functools.partial(list, wide)
        if self._beside:
            yield "the shipped plan alone", list

    def _explain_widened(self, inferred: Sequence[ShardingPlan]) -> None:
        """Note the reasons for what the self-check, and not inference, leaves whole in the plans that were proved."""
        if not self._why_wide:
            return
        found = f"sharded, the self-check found: {self._why_wide}"
        for rule in (rule for plan in inferred for rule in plan.rules):
            if rule.style == "whole":
                self._known.whole.setdefault(rule.pattern, found)
            elif isinstance(rule, BlocksRule) and not rule.sp:
                self._known.no_sp.setdefault(rule.pattern, f"on shards the self-check found: {self._why_wide}")
        if self._beside and not inferred:
            self._known.rest = found

    def _add_vocabulary(self, out: Proved) -> None:
        """Add the rules for embeddings and heads over a vocabulary to the plans; what no proof will show must be certain."""
        if not self._config.vocab:
            self._vocabulary = ["vocabulary: whole, as vocab=False says"]
            names = find_vocabulary(out.plans, self._module, self._tp, self._config.sp)
            self._known.vocabulary = dict.fromkeys(names, VOCAB_OFF)
            return
        certain = not self._config.self_check or self._example().example is None
        sizes, callbacks = (self._tp, self._config.sp), getattr(self._trainer, "callbacks", ())
        choice = with_vocabulary(out.plans, self._config.plan, self._module, *sizes, certain=certain, callbacks=callbacks)
        out.plans, self._vocabulary, self._known.vocabulary = choice.plans, choice.lines, choice.reasons

    def _check_vocabulary(self, out: Proved) -> bool:
        """Run the self-check; if it fails, try with a whole vocabulary: other code than the embedding may read its weight."""
        try:
            return self._check(out)
        except ValueError as error:
            sharded, out.plans = out.plans, without_vocabulary(out.plans)
            if len(sharded) == len(out.plans):
                raise
            try:
                passed = self._check(out)
            except ValueError:
                out.plans = sharded
                raise error from None
            why = _cause(error)
            self._known.vocabulary = {name: reason or why for name, reason in self._known.vocabulary.items()}
            self._vocabulary = [f"vocabulary: whole, since it is not right sharded: {why}"]
            rank_zero_warn(
                f"lightning_seqpar: the vocabulary stays whole on every rank, since the model is not right with it sharded: {why}. "
                "Code that reads the weight of an embedding or a head must do it through the module; vocab=False says that it is "
                "meant so"
            )
            return passed

    def _check(self, out: Proved) -> bool:
        """Whether the self-check proves the plans of ``out``; False of shipped ones without an example. Collective."""
        example, _, failures, evaluation = self._example()
        sources = ", ".join(dict.fromkeys(plan.source for plan in out.plans))
        if example is None:
            problem = f"the plan ({sources}) can't be proved: no example input: {'; '.join(dict.fromkeys(failures))}"
            if all(plan.source.startswith("family") or plan.source == SOURCE for plan in out.plans):
                rank_zero_warn(f"lightning_seqpar: {problem}. It was proved on this source when it was shipped; {_WAYS_OUT}")
                out.lines.append("self-check: not run, there is no example input")
                return False
            raise ValueError(f"self_check: {problem}; {_WAYS_OUT}")
        verdict = self._compare(
            lambda groups, **options: self_check(self._module, out.plans, self._config, groups, example, evaluation, **options)
        )
        self._draws_differ |= verdict.draws
        self._not_evaluated = verdict.not_evaluated
        if verdict.wrong:
            what = "; ".join(verdict.wrong)
            rules = "".join(f"\n  {line}" for plan in out.plans for line in plan.to_yaml().splitlines()[1:])
            tiles = f", its MLPs in tiles (tile_mlp={self._config.tile_mlp})," * (self._config.tile_mlp is not None)
            raise SelfCheckError(
                f"self_check: with the plan ({sources}) the sharded model{tiles} does not do what the whole one does, so nothing "
                f"is trained ({example.method} with {example.source}): {what}.\nThe rules were:{rules}\nMend them with "
                "plan={'rules': [...]} (later rules win), or leave the module whole"
                + "; an MLP that looks at other positions can't run in tiles: leave tile_mlp out"
                * bool(tiles)
            )
        if idle := not_proved(verdict.idle, out.plans, self._module):
            rank_zero_warn(
                f"lightning_seqpar: the self-check's example does not run {', '.join(idle[:5])}"
                f"{' ...' if len(idle) > 5 else ''}: the plan is not proved for them"
            )
        return True

    def _compare(self, check: Callable[..., Verdict]) -> Verdict:
        """The verdict of a check on copies, on this rank's device, or on the CPU if some rank's has no room; collective."""
        example, dtype = self._checked, self._example().dtype
        device, groups = self._device, self._groups
        if device.type != "cpu":  # all ranks take the same: where one has no room, all compute on the CPU
            lacks_room = torch.tensor([self._search.room(example, dtype) != device], dtype=torch.int32, device=device)
            dist.all_reduce(lacks_room, op=dist.ReduceOp.MAX, group=self._world)
            if bool(lacks_room):
                device, groups = torch.device("cpu"), groups.over_gloo(self._config.timeout)
        verdict = check(groups, device=device, dtype=dtype, prepare=self._prepare)
        if groups is not self._groups:
            groups.destroy()
        return verdict


def _inferred(out: Proved) -> list[ShardingPlan]:
    return [plan for plan in out.plans if plan.source == "inferred"]


def _cause(error: Exception) -> str:
    """What a self-check found, out of its error's text."""
    return (str(error).partition("): ")[2].partition(".\nThe rules were")[0] or str(error)).rstrip(".")


def write_plan(plans: Sequence[ShardingPlan], text: str) -> str:
    """Write the rules of plans into a file of the XDG cache that ``plan=FILE`` reads, behind a text: its path, if any."""
    rules = "".join(plan.to_yaml().partition("\n")[2] for plan in plans)
    content = "".join(f"# {line}\n" for line in text.splitlines()) + "rules:\n" + rules
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(cache) if cache else Path.home() / ".cache") / "lightning_seqpar" / "plans"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{hashlib.sha256(rules.encode()).hexdigest()[:12]}.yaml"
        file.write_text(content)
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        return ""
    return str(file)
