"""A plan read on a model, and everything that can be checked before the model is changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from lightning_seqpar.layout.linear_kind import DOWN, UP, is_depthwise
from lightning_seqpar.layout.module_names import in_all_layers, inside, outwards
from lightning_seqpar.layout.param_layout import ParamLayout, Reason
from lightning_seqpar.plan.sharding_plan import STYLES, ShardingPlan
from lightning_seqpar.styles.style import PlannedModel

_NOT_POINTWISE = (
    *(nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.modules.conv._ConvNd, nn.RNNBase),
    *(getattr(nn.modules.pooling, f"_{kind}PoolNd") for kind in ("Max", "Avg", "AdaptiveAvg", "AdaptiveMax")),
)


class ResolvedPlan(PlannedModel):
    """Plans (later ones win) that can be carried out on a whole model: every style has checked what it names.

    Nothing is changed. ``loss_chunk`` is how many tokens' logits a head that is sharded by vocabulary makes at once.
    """

    def __init__(
        self, model: nn.Module, plans: Sequence[ShardingPlan], size: int, sp: bool, loss_chunk: int | None = None
    ) -> None:
        super().__init__(model, [match for plan in plans for match in plan.match(model)], list(STYLES), size, sp, loss_chunk)
        self._aliases = self._other_names_of_vocabularies()
        for match in self.decided:
            match.rule.check(match.name, self)
        self._check_loss_chunk()
        if (
            all(isinstance(self.modules[n], nn.TransformerEncoder) for n in self.linears)
            and not self.unwrapped_parameters
            and not self.named("vocab")
        ):
            raise ValueError("the plan shards nothing: give at least one 'column' and one 'row' rule, or set tp=1")
        if self.sp:
            self._check_pointwise()
        self._check_ties()

    # ---- checks of the model as a whole, before anything changes ---------------------------------------------------

    def _check_loss_chunk(self) -> None:
        linears = [name for name, module in self.modules.items() if isinstance(module, nn.Linear)]
        if self.loss_chunk is not None and not any(name in self.named("vocab") for name in linears):
            likely = [name for name in linears if not any(stack.covers(name) for stack in self.stacks)]
            rule = " or ".join(f"{{pattern: {name}, style: vocab}}" for name in likely[-3:] or ["HEAD"])
            raise ValueError(
                f"loss_chunk={self.loss_chunk}: no head of this plan is sharded by vocabulary, so its logits are made whole; "
                f"leave loss_chunk out, or set vocab=True, which shards the heads that are found, or add a rule for the head (and "
                f"one for its embedding, if they are tied): {rule}"
            )

    def _check_pointwise(self) -> None:
        replaced = [n for n in self.named("replace") if not isinstance(self.modules[n], nn.TransformerEncoder)]
        gathered = [*self.named("gather"), *sorted(replaced)]
        for name, module in self.modules.items():
            whole = any(inside(name, other) for other in self.named("whole"))
            inner = any(inside(name, g) for g in gathered)
            if inner and is_depthwise(module) and f"{name}.weight" in self.named("local_heads"):
                continue  # of whole sequences it has channels of its own
            if isinstance(module, _NOT_POINTWISE) and self.sp_at(name) and not whole:
                around = name.rpartition(".")[0]
                in_block = any(around in stack.blocks for stack in self.stacks)
                pattern = in_all_layers(name if in_block or not around else around)
                raise ValueError(
                    f"{name}: a {type(module).__name__} mixes positions (or needs whole features), and here each rank has a "
                    f"part of them{' (inside a gather it sees local features)' if inner else ''};"
                    f" what may help, untried: {{pattern: {pattern}, style: whole}}, to leave "
                    "those blocks out of the plan, or sp=False if it lies outside every gather"
                )

    def _check_ties(self) -> None:
        names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            module, _, leaf = name.rpartition(".")
            canonical = ".".join(part for part in (self.canonical[module], leaf) if part)
            if canonical not in names[id(parameter)]:
                names[id(parameter)].append(canonical)
        vocabs = self.named("vocab")
        for tied in names.values():
            facts = {(layout.shard, layout.is_partial) for layout in map(self.layout_of, tied)}
            left = [name for name in tied if name.rpartition(".")[0] not in vocabs and name not in self._aliases]
            if len(facts) == 1 and not left:
                continue
            if left and len(left) < len(tied):
                raise ValueError(
                    f"{' and '.join(tied)} are one tied parameter, of which 'vocab' names a part only; name {', '.join(left)} too "
                    "(the modules), or none of them"
                )
            if len(facts) > 1 or (len(tied) > 1 and any(shard is not None for shard, _ in facts)):
                raise ValueError(
                    f"{' and '.join(tied)} are one tied parameter, used both inside and outside the sequence region or "
                    "sharded on one side; its gradient can't be synced by one rule: leave it whole on both sides, or untie it"
                )

    # ---- layouts -----------------------------------------------------------------------------------------------

    def _other_names_of_vocabularies(self) -> dict[str, str]:
        """Names of sharded heads' biases in modules around the heads, and in the heads: BERT keeps its decoder's bias twice."""
        vocabs = self.named("vocab")
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        held = {id(p): name for name, p in parameters.items() if name.rpartition(".")[0] in vocabs and p.ndim == 1}
        return {
            name: held[id(p)]
            for name, p in parameters.items()
            if id(p) in held and name.rpartition(".")[0] not in vocabs and inside(held[id(p)], name.rpartition(".")[0])
        }

    def layout_of(self, parameter: str) -> ParamLayout:
        """The layout of a parameter: of a style that names it or a module around it; else whole, and partial by what it sees."""
        if (held := self._aliases.get(parameter)) is not None:
            return replace(self.layout_of(held), name=parameter)
        around = [*outwards(parameter.rpartition(".")[0]), ""]
        for name in (parameter, *reversed(around)):  # what is said of all of a module counts before what is said of a part
            for match in self.at(name):
                layout = match.rule.layout(parameter, name, self)
                if layout is not None:
                    return layout
        module = parameter.rpartition(".")[0]
        if self.stack_reaching(module) is None:
            return self.make_layout(parameter)
        sp = self.sp_at(module)
        in_gather = any(inside(module, name) for name in self.openers) and not self._follows_row(module)
        if sp:
            return self.make_layout(parameter, Reason.GATHER_TO_ROW if in_gather else Reason.SEES_SHARDS, partial=True)
        return self.make_layout(parameter, Reason.COPY_TO_ROW if in_gather else Reason.IDENTICAL, partial=in_gather)

    def _follows_row(self, module: str) -> bool:
        """Whether it is the second half of a row's adapter: the first one's sums are reduced before it."""
        around, half, adapter = module.rpartition(f".{UP}.")
        return bool(half) and f"{around}.{DOWN}.{adapter}" in self.named("row")
