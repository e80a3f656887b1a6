"""Break the source on purpose, one fault at a time, and show which test sees it.

    make mutants                 all of them, with a table at the end
    make mutants ARGS=norm       those with 'norm' in their name

Each fault is a replacement in a copy of the repository; the package itself has no switches. Exit code 1 if any fault
survives.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAINING = "tests/test_parity.py tests/test_training.py tests/test_collectives.py tests/test_layers.py"


@dataclass(frozen=True)
class Mutant:
    """A fault: in ``file``, ``old`` (which must stand there exactly once) becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    tests: str = TRAINING


MUTANTS = [
    Mutant(
        "norm sync left out",
        "grad_sync.py",
        "        grad.copy_(total)\n",
        "        del total\n",
    ),
    Mutant(
        "average for sum",
        "grad_sync.py",
        "flat = all_reduce(flat, group)",
        "flat = all_reduce(flat, group); flat /= dist.get_world_size(group)",
    ),
    Mutant(
        "sync on the world group",
        "grad_sync.py",
        "group = self._groups[axes if len(axes) > 1 else axes[0]]",
        'group = self._groups["dp", "tp"]',
    ),
    Mutant(
        "sync per micro-batch",
        "grad_sync.py",
        "partial.hook = parameter.register_hook(self._arrival(partial))",
        'partial.hook = parameter.register_post_accumulate_grad_hook(lambda p, own=partial: (dist.all_reduce(p.grad, group=self._groups["tp"]), setattr(own, "synced", p.grad), None)[-1])',
    ),
    Mutant(
        "sync of a kept gradient counts it tp times",
        "grad_sync.py",
        "                    partial.parameter.grad = kept.div_(share) if kept is partial.synced else kept / share\n",
        "                    pass\n",
    ),
    Mutant(
        "row bias unsynced",
        "blueprint.py",
        '            return layout(partial=sp, reason="row bias: added to shards" if sp else ""), False\n',
        "            return layout(), False\n",
    ),
    Mutant(
        "heads' norm unsynced without sp",
        "blueprint.py",
        'return layout(partial=in_gather, reason="between copy and row" if in_gather else ""), in_gather',
        "return layout(), False",
    ),
    Mutant(
        "wrong conjugate for the gather",
        "collectives.py",
        "        return reduce_scatter_to_sequence_parallel_region(grad, ctx.dim, ctx.group), None, None, None\n",
        "        return _SplitGrad.apply(grad, ctx.dim, ctx.group), None, None, None\n",
    ),
    Mutant(
        "wrong conjugate for the exit",
        "collectives.py",
        "        return _SplitGrad.apply(grad, ctx.dim, ctx.group), None, None, None",
        "        return reduce_scatter_to_sequence_parallel_region(grad, ctx.dim, ctx.group), None, None, None",
    ),
    Mutant(
        "collective forgets its group",
        "collectives.py",
        "group.alltoall_base(self._out, self._sent",
        "dist.distributed_c10d._get_default_group().alltoall_base(self._out, self._sent",
    ),
    Mutant("gather not trimmed", "collectives.py", "if self._length is not None and", "if False and"),
    Mutant(
        "fused parts out of order",
        "layers/shard.py",
        "        return cls(dim, start, tuple(tuple(held) for held in ranges))",
        "        return cls(dim, start, tuple(((r * start // size, (r + 1) * start // size),) for r in range(size)))",
    ),
    Mutant(
        "own gather sums nothing",
        "layers/linear.py",
        "scattering = PendingReduceScatter(partial, ctx.dim, ctx.group, async_op=True)",
        "scattering = PendingReduceScatter(partial / 2, ctx.dim, ctx.group, async_op=True)",
    ),
    Mutant(
        "clip with local norms",
        "precision.py",
        "torch.nn.utils.clip_grads_with_norm_(parameters, float(clip_val), total)",
        "del total; torch.nn.utils.clip_grad_norm_(parameters, clip_val)",
    ),
    Mutant(
        "whole parameters counted tp times in the norm",
        "grad_sync.py",
        "            whole.append(parameter.grad)\n        elif found.shard.has_shared",
        "            sharded.append(parameter.grad)\n        elif found.shard.has_shared",
        "tests/test_parity.py tests/test_guards.py",
    ),
    Mutant(
        "sampler by global rank",
        "sampler.py",
        'self.num_replicas, self.rank = groups.size("dp"), groups.rank("dp")',
        "self.num_replicas, self.rank = dist.get_world_size(), dist.get_rank()",
        "tests/test_data.py",
    ),
    Mutant(
        "ranks of a replica shuffle each for itself",
        "sampler.py",
        '            share_streams(self.groups["tp"], source, torch.device("cpu"))\n            self._share_generator(source)\n',
        "",
        "tests/test_data.py",
    ),
    Mutant(
        "optimizer made before the swap",
        "strategy.py",
        "        record = self._parallelize(module)\n",
        "        self.setup_optimizers(trainer) if fitting else None\n        record = self._parallelize(module)\n        self.setup_optimizers = lambda trainer: None\n",
        "tests/test_guards.py",
    ),
    Mutant(
        "DDP over the world group",
        "stepping.py",
        'process_group=self.groups["dp"], **options',
        'process_group=self.groups["dp", "tp"], **options',
    ),
    Mutant(
        "replicas start apart",
        "strategy.py",
        "        self._make_replicas_equal(module)\n",
        "",
        "tests/test_guards.py",
    ),
    Mutant(
        "metrics over the world",
        "environment.py",
        'self.groups["dp"] if group is None else group, reduce_op=reduce_op',
        "self._world if group is None else group, reduce_op=reduce_op",
        "tests/test_data.py",
    ),
    Mutant(
        "torchmetrics over the world",
        "metrics.py",
        "        if metric.process_group is None:\n",
        "        if False:\n",
        "tests/test_data.py",
    ),
    Mutant(
        "checkpoint of shards",
        "saving.py",
        "        return full_state_dict(record, self.root_device)",
        "        with record.allow_state_dict():\n            return super().lightning_module_state_dict()",
        "tests/test_checkpoint.py",
    ),
    Mutant(
        "moments of shards in the checkpoint",
        "saving.py",
        "        return full_optimizer_state(plain_optimizer(optimizer), record.layout, record.groups, self.root_device)",
        "        return super().optimizer_state(optimizer)",
        "tests/test_checkpoint.py",
    ),
    Mutant(
        "state_dict not guarded",
        "parallelize.py",
        "        if not record.reading:\n",
        "        if False:\n",
        "tests/test_checkpoint.py",
    ),
    Mutant(
        "losses of a replica not compared",
        "stepping.py",
        "                check_loss(closure_loss, self.groups)\n",
        "",
        "tests/test_guards.py",
    ),
    Mutant(
        "padded positions of a packed encoder not zeroed",
        "layers/attention.py",
        "        out = out * (split(kept, 1, self.region.group) if self.region.sp else kept)\n",
        "        del kept\n",
        "tests/test_training.py",
    ),
    Mutant(
        "batches of a replica not compared",
        "stepping.py",
        "            check_batch(args[0], self.groups, self.root_device, loop)\n",
        "",
        "tests/test_guards.py",
    ),
    Mutant(
        "readers of partial parameters not looked at",
        "stepping.py",
        "                check_readers(closure_loss, record)\n",
        "",
        "tests/test_guards.py",
    ),
    Mutant(
        "ancestry of a column's input not looked at",
        "region.py",
        "        self._check_ancestry(x, module)\n",
        "",
        "tests/test_guards.py",
    ),
    Mutant(
        "residual inside a gathering module not seen",
        "region.py",
        "and nodes and self._passes_by(out.grad_fn, nodes):",
        "and False:",
        "tests/test_guards.py",
    ),
    Mutant(
        "region may stay open",
        "region.py",
        "        if self.active:\n            self.reset()\n            self._raise_open()\n",
        "",
        "tests/test_guards.py",
    ),
    Mutant(
        "order of the axes reversed",
        "topology.py",
        'names = config.order.split("-")',
        'names = config.order.split("-")[::-1]',
        "tests/test_topology.py",
    ),
    Mutant(
        "row-major strides in the wrong direction",
        "topology.py",
        "math.prod(self.dims[i + 1 :]) for i",
        "math.prod(self.dims[:i]) for i",
        "tests/test_topology.py",
    ),
    Mutant(
        "hop does not wrap around",
        "topology.py",
        "(self.get_stage(rank) + 1) % self.pipeline_size",
        "min(self.get_stage(rank) + 1, self.pipeline_size - 1)",
        "tests/test_topology.py",
    ),
    Mutant(
        "embedding group without its split rank",
        "topology.py",
        "stages = {0, self.pipeline_size - 1} | ({split_rank} if split_rank is not None else set())",
        "stages = {0, self.pipeline_size - 1}",
        "tests/test_topology.py",
    ),
    Mutant(
        "interleaved layers in one piece",
        "topology.py",
        "range((turn * stages + stage) * size, (turn * stages + stage + 1) * size)",
        "range((stage * rounds + turn) * size, (stage * rounds + turn + 1) * size)",
        "tests/test_topology.py",
    ),
    Mutant(
        "groups made from the first list",
        "groups.py",
        "            ranks = tuple(self.ranks(axes)) if self._grid_rank >= 0 else (self._world_rank,)\n",
        "            ranks = tuple(self.topology.get_axis_comm_lists(*axes)[0])\n",
        "tests/test_groups.py",
    ),
    Mutant(
        "only members count their embedding group",
        "groups.py",
        "            if shared is None:\n",
        "            if shared is None and member:\n",
        "tests/test_groups.py",
    ),
    Mutant(
        "groups made anew under a dead one's name",
        "groups.py",
        "            group.shutdown()\n",
        "            dist.destroy_process_group(group)\n",
        "tests/test_groups.py",
    ),
    Mutant(
        "a mapped grid's ranks sorted",
        "groups.py",
        "sort_ranks=False",
        "sort_ranks=True",
        "tests/test_groups.py",
    ),
    Mutant(
        "message without its fix",
        "config.py",
        "a size must be 1 or more; leave it out for {default}",
        "a size must be 1 or more",
        "tests/test_bad_input.py",
    ),
    Mutant(
        "synonyms forgotten",
        "config.py",
        "    if SYNONYMS.get(word) in known:\n",
        "    if word in known:\n",
        "tests/test_bad_input.py",
    ),
    Mutant(
        "ranks that disagree go on",
        "agreement.py",
        "    if int(extremes[0]) == -int(extremes[1]):\n",
        "    if int(extremes[0]) >= -int(extremes[1]):\n",
        "tests/test_agreement.py",
    ),
    Mutant(
        "plans and models not compared",
        "strategy.py",
        "        check_agreement(told_of_model(module), self._world, self.root_device)\n",
        "",
        "tests/test_agreement.py",
    ),
    Mutant(
        "a broadcast batch without the reader's random streams",
        "broadcast.py",
        "                set_streams(streams, _CPU)\n",
        "                pass\n",
        "tests/test_broadcast.py",
    ),
    Mutant(
        "a reader's failure kept to itself",
        "broadcast.py",
        '                    told = [("failed", f"{type(error).__name__}: {error}", get_streams(_CPU))]\n',
        '                    told = [("end", None, get_streams(_CPU))]\n',
        "tests/test_broadcast.py",
    ),
    Mutant(
        "SIGTERM not heard in a collective",
        "launcher.py",
        "            self.watch.hear_signals(taken, self.cluster_environment.global_rank())\n",
        "",
        "tests/test_launch.py -k sigterm",
    ),
    Mutant(
        "signals of forked processes taken for the run's",
        "launcher.py",
        "        os.register_at_fork(after_in_child=self._forget_signals)\n",
        "",
        "tests/test_launch.py -k forked",
    ),
    Mutant(
        "optimizers not compared",
        "stepping.py",
        "told_of_optimizer(plain_optimizer(one)) for at",
        "type(plain_optimizer(one)).__name__ for at",
        "tests/test_agreement.py",
    ),
    Mutant(
        "batches compared by the run's steps alone",
        "stepping.py",
        "if args and (due or self._is_due(self._since_start[loop])):",
        "if args and due:",
        "tests/test_guards.py",
    ),
    Mutant(
        "a sweep starts ranks",
        "environment.py",
        "                refuse_sweep(self.num_nodes * self.num_processes)\n",
        "                pass\n",
        "tests/test_ways_in.py -k sweep",
    ),
    Mutant(
        "shared kv gradients not summed",
        "grad_sync.py",
        "        for part in shared:\n            part.take()\n",
        "        del shared\n",
        "tests/test_zoo.py tests/test_styles.py",
    ),
    Mutant(
        "a shared kv head counts twice in the norm",
        "grad_sync.py",
        "            sharded.append(parameter.grad.index_select(found.shard.dim, first))",
        "            sharded.append(parameter.grad)",
        "tests/test_styles.py -k shared_parts",
    ),
    Mutant(
        "encoder states gathered backwards alone",
        "region.py",
        "        copied = copy_to_tensor_parallel_region(x, self.group)\n        self._frame.copied",
        "        copied = x.view_as(x)\n        self._frame.copied",
        "tests/test_zoo.py -k encoder_decoder",
    ),
    Mutant(
        "owners of blocks taken for blocks",
        "dataflow.py",
        "len(calls) > 1 and not any(_holds_a_chain(trace, call, listed.values()) for call in calls)",
        "len(calls) > 1",
        "tests/test_infer.py -k own_a_chain",
    ),
    Mutant(
        "experts taken for a chain of blocks",
        "dataflow.py",
        "if before and trace.values[one.args[key]].root == trace.values[before.outputs[0]].root:",
        "if before:",
        "tests/test_infer.py -k outside_any_list",
    ),
    Mutant(
        "segments of a column share one count of units",
        "support.py",
        "        return [self._units(column, start, stop) for start, stop, _ in segments]",
        "        return [self._units(column, 0, None)] * len(segments)",
        "tests/test_hf_uses.py -k infer-phi3-attentions",
    ),
    Mutant(
        "parameters that are added while training pass",
        "guards.py",
        "    if any(record.layout.of(parameter) is None for parameter in parameters):",
        "    if False:",
        "tests/test_adapters.py -k known_not",
    ),
    Mutant(
        "losses do not ride along",
        "stepping.py",
        "            self._sync.losses.note(closure_loss)\n",
        "",
        "tests/test_guards.py -k begins_to_read",
    ),
    Mutant(
        "outputs behind the last due step pass",
        "stepping.py",
        '        self._outputs.check(self.groups, "predict")\n',
        "",
        "tests/test_guards.py -k made_of_parts",
    ),
    Mutant(
        "thawed parameters are not averaged over replicas",
        "stepping.py",
        "        if self._thawed() or (waits and",
        "        if (waits and",
        "tests/test_training.py -k thaw",
    ),
    Mutant(
        "gradients of replicas not compared",
        "stepping.py",
        "            check_reduced(_parameters(optimizer), self.groups)\n",
        "",
        "tests/test_guards.py -k replicas",
    ),
    Mutant(
        "a replaced gradient taken for a part",
        "grad_sync.py",
        "            if not partial.fired and kept is not None:\n",
        "            if not partial.fired and kept is not None and kept is partial.synced:\n",
        "tests/test_training.py -k in_place_of_ours",
    ),
    Mutant(
        "a batch of ignored targets poisons the weights",
        "layers/logits.py",
        ".masked_fill(~valid, 0)  # infinite",
        "  # infinite",
        "tests/test_logits.py",
    ),
    Mutant(
        "copies of shards pass for the whole",
        "parallelize.py",
        "            self.modules[name].__dict__[_PART] = name\n",
        "            self.modules[name].__dict__.pop(_PART, None)\n",
        "tests/test_guards.py -k copies",
    ),
    Mutant(
        "the self-check passes everything",
        "selfcheck.py",
        "        verdict = _compare(dense, sharded, record, names, groups)\n",
        "        verdict = Verdict()\n",
        "tests/test_selfcheck.py",
    ),
    Mutant(
        "the self-check looks at the forward alone",
        "selfcheck.py",
        "        if wrong and not gap <= worst:\n",
        "        if False:\n",
        "tests/test_selfcheck.py -k gradient",
    ),
    Mutant(
        "small gradients may be twice too large",
        "selfcheck.py",
        "(own > OWN_LIMIT and gap > NOISE[narrow])",
        "False",
        "tests/test_selfcheck.py -k small",
    ),
    Mutant(
        "a proof holds for another model",
        "proof.py",
        "        return hashlib.sha256((told + self._digest).encode()).hexdigest()",
        "        return hashlib.sha256(told.encode()).hexdigest()",
        "tests/test_selfcheck.py -k numbers",
    ),
    Mutant(
        "head counts never found",
        "blockplan.py",
        "            return list(chosen)\n",
        "            return []\n",
        "tests/test_infer.py tests/test_zoo.py",
    ),
    Mutant(
        "one rank rehearsed for all",
        "support.py",
        "        for rank in range(tp):\n            try:\n",
        "        for rank in range(1):\n            try:\n",
        "tests/test_infer.py tests/test_zoo.py",
    ),
    Mutant(
        "every rank draws the same masks",
        "random.py",
        'salt=rank.to_bytes(4, "little")',
        'salt=b"0"',
        "tests/test_random.py",
    ),
    Mutant(
        "whole activations dropped out apart",
        "region.py",
        "            self.streams.pause()  # what it drops out before its columns is whole\n",
        "            pass\n",
        "tests/test_random.py",
    ),
    Mutant(
        "every step draws the same masks",
        "random.py",
        "        _advance([_differ([a], [b]) for a, b in zip(own, self._started, strict=True)])\n",
        "",
        "tests/test_random.py",
    ),
    Mutant(
        "padding of the vocabulary not cut off",
        "layers/logits.py",
        "local.ndim - 1, self._group, self._shard.length)",
        "local.ndim - 1, self._group)",
        "tests/test_logits.py",
    ),
    Mutant(
        "a stand-in that is zero",
        "region.py",
        'whole.new_full((), float("nan"))',
        "whole.new_full((), 0.0)",
        "tests/test_styles.py -k stand_in",
    ),
    Mutant(
        "flattened tokens folded the wrong way round",
        "region.py",
        "        sizes = (of.batch, positions) if self.dim == 1 else",
        "        sizes = (of.batch, positions) if self.dim == 0 else",
        "tests/test_products.py",
    ),
    Mutant(
        "a bias added to partial sums by every rank",
        "hooks.py",
        "parameter * 0.0",
        "parameter * 1.0",
        "tests/test_products.py",
    ),
    Mutant(
        "an expert's row bias added by every rank",
        "layers/linear.py",
        "float(self.region.rank == 0)",
        "1.0",
        "tests/test_products.py",
    ),
    Mutant(
        "a whole expert among sharded ones accepted",
        "blueprint.py",
        "if twin in self.modules and twin not in self.linear:",
        "if twin not in self.modules:",
        "tests/test_products.py",
    ),
    Mutant(
        "an expert without tokens in the example left whole",
        "blockplan.py",
        "        self._plan.rules += _idle_experts(self._model, self._flow, self._plan.rules)\n",
        "",
        "tests/test_products.py",
    ),
    Mutant(
        "routing weights summed in less precision than the activation",
        "hooks.py",
        "if len(kinds) > 1 else None",
        "if len(kinds) > 9 else None",
        "tests/test_products.py",
    ),
    Mutant(
        "what a module adds to a sum not looked at",
        "region.py",
        "        Parts(frame.parts, rows, once).check(out, sources, name)\n",
        "",
        "tests/test_products.py",
    ),
    Mutant(
        "a loss that reads a router inside a sum not seen",
        "linearity.py",
        "            if node in owners:\n",
        "            if False:\n",
        "tests/test_products.py",
    ),
    Mutant(
        "an escaping balance not seen in the data flow",
        "dataflow.py",
        "                if self._escapes(call):\n                    return False\n",
        "",
        "tests/test_products.py",
    ),
    Mutant(
        "places in a queue counted on shards",
        "blockplan.py",
        "if (counted := orders_tokens(self._trace, self._flow)) is not None:",
        "if (counted := orders_tokens(self._trace, self._flow)) is not None and False:",
        "tests/test_products.py",
    ),
    Mutant(
        "tokens in another order not seen",
        "blockplan.py",
        "if (moved := reorders_tokens(self._trace, self._flow)) is not None:",
        "if (moved := reorders_tokens(self._trace, self._flow)) is not None and False:",
        "tests/test_products.py",
    ),
    Mutant(
        "buffers that the forward changes not looked at",
        "selfcheck.py",
        "    verdict.wrong += _wrong_buffers(dense, sharded, record, limit, groups)\n",
        "",
        "tests/test_products.py",
    ),
    Mutant(
        "modules that the example does not run not looked at",
        "selfcheck.py",
        "    verdict.wrong += _unknown(dense, record)\n",
        "",
        "tests/test_products.py",
    ),
    Mutant(
        "parameters that the example does not use guessed at",
        "blockplan.py",
        "            products.check_used()\n",
        "            pass\n",
        "tests/test_products.py",
    ),
    Mutant(
        "draws behind an expert's first linear accepted",
        "region.py",
        "        if self._frame.sums and self.streams.own and",
        "        if False and self.streams.own and",
        "tests/test_products.py",
    ),
    Mutant(
        "padding of the vocabulary counted in the loss",
        "layers/logits.py",
        "given = self._x[some, : self.count]",
        "given = self._x[some]",
        "tests/test_logits.py",
    ),
    Mutant(
        "a norm's changed output made again unchanged",
        "lean.py",
        "return call if call is not None and x._version == call.version else None",
        "return call",
        "tests/test_lean.py",
    ),
    Mutant(
        "a norm that draws run again",
        "lean.py",
        "if not same or drawn or noted or first.data_ptr() == x.data_ptr():",
        "if type(first) is not Tensor:",
        "tests/test_lean.py",
    ),
    Mutant(
        "a norm run again outside its autocast",
        "lean.py",
        "        with self._autocast.again():\n            leaf, leaves, out =",
        "        if True:\n            leaf, leaves, out =",
        "tests/test_lean.py",
    ),
    Mutant(
        "a stretch that was changed in place made again",
        "stretch.py",
        "gained = done and alone and not self._spoiled and self._is_intact() and self._settle()",
        "gained = done and alone and self._settle()",
        "tests/test_lean.py",
    ),
    Mutant(
        "a column changed behind its row not seen",
        "stretch.py",
        "if tensor._version != self._versions[at]:",
        "if False:",
        "tests/test_lean.py",
    ),
    Mutant(
        "a stretch under activation checkpointing",
        "stretch.py",
        "if top is not None and not isinstance(outer, SavedBytes):",
        "if False:",
        "tests/test_lean.py",
    ),
    Mutant(
        "what is drawn in a stretch drawn again",
        "stretch.py",
        "REPLAYED = frozenset((*_ARITHMETIC, *_ACTIVATIONS, *_SHAPES))",
        'REPLAYED = frozenset((*_ARITHMETIC, *_ACTIVATIONS, *_SHAPES, "rand_like"))',
        "tests/test_lean.py",
    ),
    Mutant(
        "a whole gradient summed again by ranks that add nothing",
        "grad_sync.py",
        "return kept if partial.fired else kept / self._share(partial, kept)",
        "return kept",
        "tests/test_grad_sync.py",
    ),
    Mutant(
        "each rank's own largest logit taken for all",
        "layers/logits.py",
        "total = (parts[:, 1] * below.exp()).sum(0)",
        "total = parts[:, 1].sum(0)",
        "tests/test_logits.py",
    ),
    Mutant(
        "the head's gradient of the last chunk alone",
        "layers/logits.py",
        "of_head[: rows.count] += d.t()",
        "of_head[: rows.count] = d.t()",
        "tests/test_logits.py",
    ),
    Mutant(
        "a gathered input that was changed taken for the gathered one",
        "region.py",
        "read is None or read.handle is None or x._version != read.version:",
        "read is None or read.handle is None:",
        "tests/test_layers.py",
    ),
    Mutant(
        "weight-grad products made before their collective starts",
        "overlap.py",
        "    _renumber(given, number)\n",
        "",
        "tests/test_overlap.py",
    ),
    Mutant(
        "a collective waited for where it starts",
        "overlap.py",
        "        _renumber(waits, number - 1)  # below the number, the collective's own above it\n",
        "        _renumber(waits, number + 2)\n",
        "tests/test_overlap.py",
    ),
    Mutant(
        "the columns' products left out of the gradient of their input",
        "overlap.py",
        "            total.view(-1, right.shape[1]).addmm_(rows, right)",
        "            pass",
        "tests/test_overlap.py tests/test_zoo.py tests/test_parity.py",
    ),
    Mutant(
        "two pauses of one block share a state",
        "random.py",
        "            _advance([True] * len(now))  # the next pause begins at a state of its own\n",
        "",
        "tests/test_random.py",
    ),
    Mutant(
        "a recompute that begins behind a pause goes on with its stream",
        "random.py",
        '        if moved or where != "end":\n',
        "        if False:\n",
        "tests/test_random.py",
    ),
    Mutant(
        "a checkpoint's dropout kept as bytes",
        "stretch.py",
        "if top is None or top[0] != self._pack:",
        "if False:",
        "tests/test_random.py",
    ),
    Mutant(
        "what a backward left is not let go",
        "overlap.py",
        "return self._held.pop(torch._C._current_graph_task_id(), None)",
        "return self._held.get(torch._C._current_graph_task_id())",
        "tests/test_overlap.py",
    ),
    Mutant(
        "a backward in a hook shares the place of the outer one",
        "overlap.py",
        "self._held[torch._C._current_graph_task_id()] = thing",
        "self._held = {torch._C._current_graph_task_id(): thing}",
        "tests/test_overlap.py",
    ),
    Mutant(
        "what a backward in a hook gathered is not gathered again",
        "gathered.py",
        "        self.start(kept)  # nothing, unless a hook ran another backward since\n",
        "",
        "tests/test_overlap.py",
    ),
    Mutant(
        "a checkpoint's input taken for its norm's",
        "lean.py",
        " and self._keeper == keeper() else None",
        " else None",
        "tests/test_overlap.py",
    ),
    Mutant(
        "a checkpoint's input taken for what was gathered outside",
        "region.py",
        "return read.handle if read.handle.keeper == keeper() else None",
        "return read.handle",
        "tests/test_overlap.py",
    ),
    Mutant(
        "a checkpoint is held by its norms",
        "lean.py",
        "weakref.ref(top[0]) if inspect.isfunction(top[0]) else top[0]",
        "top[0]",
        "tests/test_overlap.py",
    ),
    Mutant(
        "gradients added to weights that were frozen since",
        "overlap.py",
        "or not ctx.is_plain or not weight.requires_grad:",
        "or not ctx.is_plain:",
        "tests/test_overlap.py",
    ),
    Mutant(
        "gradients pass by the hooks of their node",
        "overlap.py",
        "weight._post_accumulate_grad_hooks or _is_hooked(node):",
        "weight._post_accumulate_grad_hooks:",
        "tests/test_overlap.py",
    ),
    Mutant(
        "the gradient of a weight's gradient lost on its way round",
        "layers/linear.py",
        "if ctx.late is not None and ctx.is_plain:",
        "if ctx.late is not None:",
        "tests/test_overlap.py",
    ),
    Mutant(
        "columns that a backward does not come to are waited for",
        "overlap.py",
        "return sum(torch._C._will_engine_execute_node(node) for node in nodes)",
        "return len(nodes)",
        "tests/test_overlap.py",
    ),
    Mutant(
        "draws between a column and its row not looked at",
        "region.py",
        "if frame.tokens is not None and self.streams.own:",
        "if frame.tokens is not None and self.streams.own and not shape:",
        "tests/test_random.py",
    ),
    Mutant(
        "draws behind a row, inside the module, not looked at",
        "region.py",
        "if self._in_block and self.streams.own and not self._has_positions(shape):",
        "if self._in_block and self.streams.own and not frame.scopes and not self._has_positions(shape):",
        "tests/test_random.py",
    ),
    Mutant(
        "whole features behind the first of two rows drawn by each rank",
        "region.py",
        "if shape[-1:] == (frame.behind,) and self.active and not self._has_positions(shape):",
        "if not shape:",
        "tests/test_random.py",
    ),
    Mutant(
        "another path's features behind a row drawn alike",
        "region.py",
        "if shape[-1] == local or shape[-1] != frame.behind:",
        "if shape[-1] == local == frame.behind:",
        "tests/test_random.py",
    ),
    Mutant(
        "a rank that fails alone in the self-check waits for ever",
        "selfcheck.py",
        '    _meet(told, groups["tp"])\n',
        "",
        "tests/test_selfcheck.py -k alone",
    ),
    Mutant(
        "a rate that rises from zero goes unseen",
        "stepping.py",
        "self._watches_draws = hash(drawn) not in self._draws",
        "self._watches_draws = False",
        "tests/test_random.py",
    ),
    Mutant(
        "stochastic depth on the rank's own stream without sp",
        "parallelize.py",
        "            if stochastic and any(",
        "            if stochastic and self.sp_at(name) and any(",
        "tests/test_random.py",
    ),
    Mutant(
        "a loss that begins to read a norm goes unseen",
        "stepping.py",
        "check_readers(closure_loss, record, inside=False)",
        "check_readers(closure_loss, record, inside=True) if False else None",
        "tests/test_guards.py",
    ),
    Mutant(
        "clipping in hooks goes unseen between due steps",
        "stepping.py",
        "or any(is_overridden(hook, module) for hook in own)",
        "or False",
        "tests/test_guards.py",
    ),
    Mutant(
        "clipping in callbacks goes unseen between due steps",
        "stepping.py",
        "or any(is_overridden(hook, one, Callback) for hook in _BEHIND_BACKWARD for one in callbacks)",
        "or False",
        "tests/test_guards.py",
    ),
    Mutant(
        "gathered arguments widened to the widest",
        "hooks.py",
        "                    whole = whole.to(x.dtype)",
        "                    pass",
        "tests/test_parallelize.py",
    ),
    Mutant(
        "zeros where the output of a column has no gradient",
        "layers/linear.py",
        "        ctx.set_materialize_grads(False)\n        dtype = _autocast_dtype(x)\n        ctx.late",
        "        dtype = _autocast_dtype(x)\n        ctx.late",
        "tests/test_overlap.py",
    ),
    Mutant(
        "columns' sum waits for one that has no gradient",
        "layers/linear.py",
        "total = ctx.slot.skip_product()",
        "pass",
        "tests/test_overlap.py",
    ),
    Mutant(
        "zeros where the output of a norm has no gradient",
        "lean.py",
        "        ctx.set_materialize_grads(False)\n        ctx.call = call\n",
        "        ctx.call = call\n",
        "tests/test_overlap.py",
    ),
    Mutant(
        "zeros where the output of a row has no gradient",
        "overlap.py",
        "        ctx.set_materialize_grads(False)\n        ctx.slot, ctx.dim, ctx.group, ctx.shape = slot, dim, group, x.shape\n        return reduce_scatter",
        "        ctx.slot, ctx.dim, ctx.group, ctx.shape = slot, dim, group, x.shape\n        return reduce_scatter",
        "tests/test_overlap.py",
    ),
    Mutant(
        "what was gathered again is not let go after its last user",
        "gathered.py",
        "            self._whole, self._task = None, -1",
        "            self._task = -1",
        "tests/test_overlap.py",
    ),
    Mutant(
        "what a started collective stands in for taken for its result",
        "overlap.py",
        "        return grad if pending is None else pending.wait()\n",
        "        return grad\n",
        "tests/test_overlap.py",
    ),
    Mutant(
        "gradients added in place past a hook",
        "overlap.py",
        "if weight._backward_hooks or weight._post_accumulate_grad_hooks or _is_hooked(node):",
        "if False:",
        "tests/test_overlap.py",
    ),
    Mutant(
        "gradients added in place where torch.autograd.grad was asked for them",
        "overlap.py",
        "    except RuntimeError:  # torch.autograd.grad was asked for this weight\n        return None\n",
        "    except RuntimeError:\n        return kept\n",
        "tests/test_overlap.py",
    ),
    Mutant(
        "an input gathered for another backward is used",
        "gathered.py",
        "        if self._task != task:\n",
        "        if False:\n",
        "tests/test_overlap.py",
    ),
    Mutant(
        "anomaly mode reads what a started collective stands in for",
        "overlap.py",
        "        if torch.is_anomaly_enabled():  # which looks at every gradient\n",
        "        if False:\n",
        "tests/test_overlap.py",
    ),
    Mutant(
        "a norm's input changed before its output is used",
        "lean.py",
        "x._version == self._read and self._keeper",
        "self._keeper",
        "tests/test_lean.py",
    ),
    Mutant(
        "another tensor's gradient lost in a norm",
        "lean.py",
        "    return not _reads_others(out, [leaf, *leaves])\n",
        "    return bool(leaves) and leaf is not out\n",
        "tests/test_lean.py",
    ),
    Mutant(
        "a stretch read as another type made again as its own",
        "stretch.py",
        "        self._keep_odd_views()\n",
        "",
        "tests/test_lean.py",
    ),
    Mutant(
        "arguments that change later replayed",
        "stretch.py",
        "if not all(isinstance(value, Tensor) or _is_constant(value) for value in (*args, *kwargs.values())):",
        "if False:",
        "tests/test_lean.py",
    ),
    Mutant(
        "a stretch under a mode that changes results",
        "stretch.py",
        "        if _get_current_function_mode() is not None:\n",
        "        if False:\n",
        "tests/test_lean.py",
    ),
    Mutant(
        "logits made of weights that have changed",
        "layers/logits.py",
        "if [one._version for one in self.tensors if one is not None] != self._versions:",
        "if False:",
        "tests/test_logits.py",
    ),
    Mutant(
        "logits gathered for the loss",
        "layers/logits.py",
        "    F.cross_entropy: _loss,\n",
        "",
        "tests/test_logits.py",
    ),
    Mutant(
        "logits changed in place in a copy",
        "layers/logits.py",
        "if func in _REFUSED or _writes(func, args, kwargs):",
        "if func in _REFUSED:",
        "tests/test_logits.py",
    ),
    Mutant(
        "the gradient of gathered logits not dealt out",
        "layers/logits.py",
        "own = F.pad(grad[..., start:stop], (0, ctx.width - (stop - start)))",
        "own = F.pad(grad[..., : stop - start], (0, ctx.width - (stop - start)))",
        "tests/test_logits.py",
    ),
    Mutant(
        "buffers that ranks hold apart not seen",
        "stepping.py",
        "                check_buffers(record, self.groups, self.root_device)\n",
        "",
        "tests/test_products.py",
    ),
    Mutant(
        "frozen rows not marked",
        "linearity.py",
        " or _name(end) == MarkRow.__name__ for end in ends)",
        " for end in ends)",
        "tests/test_products.py",
    ),
    Mutant(
        "a turned activation of equal dims not seen",
        "dataflow.py",
        "                if turned:\n                    return name\n",
        "",
        "tests/test_products.py",
    ),
    Mutant(
        "draws beside raw parameters accepted",
        "region.py",
        "        if self._frame.raw:\n            raise",
        "        if False:\n            raise",
        "tests/test_products.py",
    ),
    Mutant(
        "a latent projection that all heads share dealt out",
        "support.py",
        "            owners = owners[owners > 0]\n",
        "            pass\n",
        "tests/test_infer.py",
    ),
    Mutant(
        "half of a tied gradient lost",
        "layers/vocab.py",
        "        out = F.embedding(local, self.weight) * mine",
        "        out = F.embedding(local, self.weight.detach()) * mine",
        "tests/test_logits.py tests/test_styles.py",
    ),
    Mutant(
        "a tied weight untied where it gets its numbers",
        "weights.py",
        "                torch.utils.swap_tensors(parameter, room)\n",
        "                setattr(places[0].holder, places[0].leaf, room)\n",
        "tests/test_late_weights.py",
    ),
    Mutant(
        "gather before the head missing",
        "region.py",
        "        return gather_replicated_from_sequence_parallel_region(x, self.dim, self.group, length)\n\n    def abort",
        "        return x\n\n    def abort",
    ),
    Mutant(
        "order of the summed gradients from a set",
        "grad_sync.py",
        "for name in layout if layout[name].is_partial]\n        self.attach()",
        "for name in set(layout) if layout[name].is_partial]\n        self.attach()",
    ),
    Mutant(
        "a block that reads the length of its shard not seen",
        "infer.py",
        "    whole = any(plan.reads_length for plan in known.values())\n",
        "    whole = False\n",
        "tests/test_products.py",
    ),
    Mutant(
        "hidden states given away in parts",
        "parallelize.py",
        "            yield module.register_forward_hook(return_whole(around[id(module)]))\n",
        "            yield from ()\n",
        "tests/test_hf_uses.py",
    ),
    Mutant(
        "attention maps of some heads taken for all",
        "region.py",
        "            self.parts.note(out, module, 1, heads)\n",
        "            pass\n",
        "tests/test_hf_uses.py",
    ),
    Mutant(
        "router scores of a shard taken for all",
        "parallelize.py",
        "                        yield self.modules[name].register_forward_hook(note_shards(region, name))\n",
        "",
        "tests/test_hf_uses.py",
    ),
    Mutant(
        "late weights drawn in another type",
        "deferred.py",
        "    with default_dtype(op.dtype):\n",
        "    with default_dtype(None):\n",
        "tests/test_late_weights.py",
    ),
    Mutant(
        "draws of weights that are overwritten left out",
        "deferred.py",
        "                        if op.is_random:\n",
        "                        if op.is_random and not at:\n",
        "tests/test_late_weights.py",
    ),
    Mutant(
        "a seed set while a late model is made forgotten",
        "deferred.py",
        "            op.state = len(self._states)\n",
        "            op.state = len(self._states) if not self._states else -1\n",
        "tests/test_late_weights.py",
    ),
    Mutant(
        "each rank draws late weights from its own seed",
        "strategy.py",
        "        dist.broadcast_object_list(shared, src=dist.get_process_group_ranks(self._world)[0], group=self._world)\n",
        "",
        "tests/test_late_weights.py",
    ),
    Mutant(
        "the second half of a row's adapter summed where it is whole",
        "blueprint.py",
        "        if self._follows_row(module):\n",
        "        if self._follows_row(module) and self.sp_at(module):\n",
        "tests/test_adapters.py",
    ),
    Mutant(
        "a variant of an adapter taken for the plain one",
        "adapters.py",
        "    return filled and not any(True for other in children.values() for _ in other.parameters())\n",
        "    return filled\n",
        "tests/test_adapters.py",
    ),
    Mutant(
        "fused parts written out of order",
        "folder.py",
        "        for start, stop in shard.ranges[rank]:\n            if stop > start:\n                offsets",
        "        for start, stop in reversed(shard.ranges[rank]):\n            if stop > start:\n                offsets",
        "tests/test_folder.py -k round_trips",
    ),
    Mutant(
        "random streams begin anew",
        "saving.py",
        "            unpack_streams(self._streams, self.root_device)\n        if not",
        "            pass\n        if not",
        "tests/test_folder.py -k resumed",
    ),
    Mutant(
        "the order of samples follows the stream",
        "sampler.py",
        "            torch.default_generator.manual_seed(number)\n",
        "",
        "tests/test_folder.py -k resumed",
    ),
    Mutant(
        "a failure to write kept to the first rank",
        "files.py",
        "    if told[0] is not None:\n        raise SaveError",
        "    if told[0] is not None and dist.get_rank(group) == 0:\n        raise SaveError",
        "tests/test_files.py -k failure",
    ),
    Mutant(
        "a file written in its own place",
        "files.py",
        "        write_synced(beside(place, UNFINISHED), lambda file: torch.save(checkpoint, file))\n"
        "        beside(place, UNFINISHED).replace(place)\n",
        "        write_synced(place, lambda file: torch.save(checkpoint, file))\n",
        "tests/test_files.py -k failure",
    ),
    Mutant(
        "a truncated folder is read",
        "folder.py",
        "        self._check_files()\n",
        "",
        "tests/test_folder.py -k damaged",
    ),
    Mutant(
        "16-bit sums counted at their own size",
        "grad_sync.py",
        "count * max(4, parameter.element_size())",
        "count * 2",
        "tests/test_describe.py",
    ),
    Mutant(
        "the marker written first",
        "folder.py",
        "    unfinished.mkdir(parents=True)\n",
        '    unfinished.mkdir(parents=True)\n    (unfinished / MARKER).write_text(json.dumps({"format": FORMAT}))\n',
        "tests/test_crash.py",
    ),
    Mutant(
        "moments of a replicated parameter from the wrong rank",
        "checkpoint.py",
        '        return local if _is_writer(groups) else local.to("meta")\n',
        '        return local.to("meta") if _is_writer(groups) else local\n',
        "tests/test_checkpoint.py",
    ),
    Mutant(
        "what all ranks hold written by none of some",
        "checkpoint.py",
        "writes=writer == (dp, tp)",
        "writes=writer == (dp, 0)",
        "tests/test_any_to_any.py",
    ),
    Mutant(
        "padding left in",
        "layers/shard.py",
        "        shape[self.dim] = self.length\n        whole = parts[0].new_empty(shape)\n",
        "        if self.padded is not None:\n            return torch.cat(list(parts), self.dim)\n"
        "        shape[self.dim] = self.length\n        whole = parts[0].new_empty(shape)\n",
        "tests/test_folder.py -k round_trips",
    ),
    Mutant(
        "padding left in the parts",
        "folder.py",
        "        self.shape = torch.Size(local.shape if layout is None or shard is None else layout.global_shape)\n",
        "        self.shape = torch.Size(local.shape if layout is None or shard is None else layout.global_shape)\n"
        "        if shard is not None and shard.padded is not None:\n"
        "            self.shape = torch.Size([shard.padded * len(shard.ranges), *self.shape[1:]])\n",
        "tests/test_folder.py -k round_trips",
    ),
    Mutant(
        "the writing dealt to one replica",
        "checkpoint.py",
        "        self._loads[row] += math.prod(layout.global_shape) * value.element_size() / self._loads.shape[1]\n",
        "",
        "tests/test_saving_memory.py -k share",
    ),
    Mutant(
        "what is written meanwhile is no copy",
        "folder.py",
        'offsets: (piece.to("cpu", copy=True), True)',
        "offsets: (piece, True)",
        "tests/test_async.py",
    ),
    Mutant(
        "an older checkpoint goes before the new one is whole",
        "background.py",
        "        if saving is None or self._thread is None:\n",
        "        if True:\n",
        "tests/test_async.py",
    ),
    Mutant(
        "a name that is being written is free",
        "saving.py",
        "                self._tell_names(callback)\n",
        "                pass\n",
        "tests/test_async.py",
    ),
    Mutant(
        "training ends before its last checkpoint is written",
        "saving.py",
        "        self._trains = False\n        self._background.wait()\n",
        "        self._trains = False\n",
        "tests/test_async.py",
    ),
    Mutant(
        "what one rank can't read the others go on with",
        "files.py",
        "        if one is not None:\n            raise ValueError",
        "        if one is not None and rank < 0:\n            raise ValueError",
        "tests/test_files.py -k one_rank",
    ),
    Mutant(
        "moments live in the file that was read",
        "checkpoint.py",
        "own_memory(value) if value is flat[index, key] else value",
        "value",
        "tests/test_files.py -k lives",
    ),
    Mutant(
        "loaders shuffled alike",
        "sampler.py",
        "1_000_003 * place",
        "0 * place",
        "tests/test_data.py -k two_shuffled",
    ),
    Mutant(
        "an order that is agreed on behind the first read",
        "sampler.py",
        "        dealt.set_epoch(epoch)\n",
        "        pass\n",
        "tests/test_data.py -k before",
    ),
    Mutant(
        "buffers of several replicas in one folder",
        "checkpoint.py",
        "alike=isinstance(value, nn.Parameter)",
        "alike=True",
        "tests/test_folder.py -k buffers",
    ),
    Mutant(
        "weights that differ written as tied ones",
        "huggingface.py",
        "if identity(one) != identity(other) and not torch.equal(",
        "if identity(one) != identity(other) and torch.equal(",
        "tests/test_huggingface.py -k apart",
    ),
    Mutant(
        "experts left stacked",
        "huggingface.py",
        "        if not mapping:\n",
        "        if mapping:\n            self._model._weight_conversions = None\n        if True:\n",
        "tests/test_huggingface.py",
    ),
    Mutant(
        "tensors under the model's prefix that it has not are dropped",
        "huggingface.py",
        "        if self._start and (more := ",
        "        if False and (more := ",
        "tests/test_huggingface.py -k this_model",
    ),
    Mutant(
        "all of a shard is held while it is written",
        "huggingface.py",
        "    store = torch.from_file(str(path), shared=True, size=max(at, 1), dtype=torch.uint8)\n",
        "    path.touch()\n    store = torch.zeros(max(at, 1), dtype=torch.uint8)\n",
        "tests/test_huggingface.py -k held",
    ),
]


def copy_repository(folder: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if name.endswith((".py", ".yaml", ".toml")) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def run(mutant: Mutant) -> tuple[bool, str]:
    """Whether a test went red, and which."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        copy_repository(folder)
        file = folder / "lightning_seqpar" / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            return False, f"STALE: its text stands {text.count(mutant.old)} times in {mutant.file}"
        file.write_text(text.replace(mutant.old, mutant.new))
        env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        where = subprocess.run(
            [sys.executable, "-c", "import lightning_seqpar as l; print(l.__file__)"],
            cwd=folder, env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if where.returncode:
            return False, f"BROKEN: {where.stderr.splitlines()[-1]}"
        assert Path(where.stdout.strip()).is_relative_to(folder.resolve()), where.stdout
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            *mutant.tests.split(),
        ]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
        seen = re.search(r"^FAILED (.+?)(?: - |$)", done.stdout, re.M)
        if done.returncode == 1 and seen:
            return True, seen.group(1).removeprefix("tests/")
        return (
            False,
            "SURVIVED" if done.returncode == 0 else f"pytest ended with {done.returncode}: {done.stdout[-300:]}",
        )


def main() -> int:
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.name for word in sys.argv[1:])]
    rows = []
    with ThreadPoolExecutor(2) as pool:
        for mutant, (caught, where) in zip(chosen, pool.map(run, chosen), strict=True):
            rows.append((mutant, caught, where))
            print(f"{'caught' if caught else 'ALIVE ':<7} {mutant.name:<48} {where}", flush=True)
    alive = sum(not caught for _, caught, _ in rows)
    print("\n| fault | in | first test that sees it |\n|---|---|---|")
    for mutant, _, where in rows:
        print(f"| {mutant.name} | `{mutant.file}` | `{where}` |")
    print(f"\n{len(rows) - alive} of {len(rows)} faults caught")
    return 1 if alive else 0


if __name__ == "__main__":
    raise SystemExit(main())
