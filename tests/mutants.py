"""Break the source on purpose, one fault at a time, and show which test sees it.

    make mutants                 all of them, with a table at the end
    make mutants ARGS=norm       those with 'norm' in their name
    make mutants ARGS=--check    runs nothing: those that fit the source no more, and why

Each fault is a replacement in a copy of the repository; the package itself has no switches. A fault names a definition (a
function, a method, a class or a constant of a module), wherever it lives, and a text that stands in it once: code can move
between files. Exit code 1 if any fault survives or fits no more, or if no fault has such a name.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAINING = "tests/test_parity.py tests/test_training.py tests/test_collectives.py tests/test_layers.py"


@dataclass(frozen=True)
class Mutant:
    """A fault: in a definition, ``old`` (which must stand there exactly once) becomes ``new``.

    Attributes:
        name: what is wrong, for the table.
        definition: the qualified name, such as ``GradSync.flush_all``; with the module's last name in front of it where
            several modules have one of that name, ``grad_norm:global_grad_norm``.
        old: a part of the definition's source.
        new: what stands there instead.
        tests: what is run to see it, as pytest's arguments. A file is ``tests/<name>``, in whichever folder of tests it lies.
    """

    name: str
    definition: str
    old: str
    new: str
    tests: str = TRAINING


MUTANTS = [
    Mutant(
        "norm sync left out",
        "_sum_coalesced",
        "        grad.copy_(total)\n",
        "        del total\n",
    ),
    Mutant(
        "average for sum",
        "_sum_coalesced",
        "flat = all_reduce(flat, group)",
        "flat = all_reduce(flat, group); flat /= dist.get_world_size(group)",
    ),
    Mutant(
        "sync on the world group",
        "GradSync._sum_bucket",
        "group = self._groups[axes if len(axes) > 1 else axes[0]]",
        'group = self._groups["dp", "tp"]',
    ),
    Mutant(
        "sync per micro-batch",
        "GradSync.attach",
        "else parameter.register_hook(self._arrival(partial))",
        'else parameter.register_post_accumulate_grad_hook(lambda p, own=partial: (dist.all_reduce(p.grad, group=self._groups["tp"]), setattr(own, "synced", p.grad), None)[-1])',
    ),
    Mutant(
        "sync of a kept gradient counts it tp times",
        "GradSync._arrival.hook",
        "                    partial.parameter.grad = kept.div_(share) if kept is partial.synced else kept / share\n",
        "                    pass\n",
    ),
    Mutant(
        "row bias unsynced",
        "RowRule.layout",
        "Reason.ROW_BIAS_ON_SHARDS if sp else Reason.IDENTICAL, partial=sp)",
        "Reason.IDENTICAL)",
    ),
    Mutant(
        "heads' norm unsynced without sp",
        "ResolvedPlan.layout_of",
        "return self.make_layout(parameter, reason, partial=in_gather), in_gather",
        "return self.make_layout(parameter), False",
    ),
    Mutant(
        "wrong conjugate for the gather",
        "_Gather.backward",
        "        return reduce_scatter_to_sequence_parallel_region(grad, ctx.dim, ctx.group), None, None, None\n",
        "        return _applied(_SplitGrad, split, grad, ctx.dim, ctx.group), None, None, None\n",
    ),
    Mutant(
        "wrong conjugate for the exit",
        "collectives:_GatherReplicated.backward",
        "        return _applied(_SplitGrad, split, grad, ctx.dim, ctx.group), None, None, None",
        "        return reduce_scatter_to_sequence_parallel_region(grad, ctx.dim, ctx.group), None, None, None",
    ),
    Mutant(
        "collective forgets its group",
        "_Exchange.__init__",
        "group.alltoall_base(self._out, self._sent",
        "dist.distributed_c10d._get_default_group().alltoall_base(self._out, self._sent",
    ),
    Mutant("gather not trimmed", "PendingGather.wait", "if self._length is not None and", "if False and"),
    Mutant(
        "fused parts out of order",
        "Shard.by_segments",
        "        return cls(dim, start, tuple(tuple(own) for own in ranges))",
        "        return cls(dim, start, tuple(((r * start // size, (r + 1) * start // size),) for r in range(size)))",
    ),
    Mutant(
        "own gather sums nothing",
        "GatherLinear.backward",
        "scattering = PendingReduceScatter(partial, ctx.dim, ctx.group, async_op=True)",
        "scattering = PendingReduceScatter(partial / 2, ctx.dim, ctx.group, async_op=True)",
    ),
    Mutant(
        "clip with local norms",
        "_ShardedPrecision.clip_grad_by_norm",
        "total = self._strategy().global_norm(list(self.main_params(optimizer)))",
        "total = torch.nn.utils.get_total_norm([p.grad for p in parameters])",
    ),
    Mutant(
        "whole parameters counted tp times in the norm",
        "global_grad_norm",
        '("tp",) * (shard is not None)',
        '("tp",)',
        "tests/test_parity.py tests/test_guards.py",
    ),
    Mutant(
        "sampler by global rank",
        "ReplicaSampler.__init__",
        'self.num_replicas, self.rank = groups.size("dp"), groups.rank("dp")',
        "self.num_replicas, self.rank = dist.get_world_size(), dist.get_rank()",
        "tests/test_data.py",
    ),
    Mutant(
        "ranks of a replica shuffle each for itself",
        "ReplicaSampler.set_epoch",
        '            share_streams(self.groups["tp"], source, torch.device("cpu"))\n            self._share_generator(source)\n',
        "",
        "tests/test_data.py",
    ),
    Mutant(
        "optimizer made before the swap",
        "SeqParallelStrategy.setup",
        "        record = self._parallelize(module)\n",
        "        self.setup_optimizers(trainer) if fitting else None\n        record = self._parallelize(module)\n        self.setup_optimizers = lambda trainer: None\n",
        "tests/test_guards.py",
    ),
    Mutant(
        "DDP over the world group",
        "SteppingStrategy._wrap_ddp",
        'process_group=self.groups["dp"], **options',
        'process_group=self.groups["dp", "tp"], **options',
    ),
    Mutant(
        "replicas start apart",
        "SeqParallelStrategy._parallelize",
        "        self._make_replicas_equal(module)\n",
        "",
        "tests/test_guards.py",
    ),
    Mutant(
        "metrics over the world",
        "TopologyStrategy.reduce",
        'self.groups["dp"] if group is None else group, reduce_op=reduce_op',
        "self._world if group is None else group, reduce_op=reduce_op",
        "tests/test_data.py",
    ),
    Mutant(
        "torchmetrics over the world",
        "share_metrics",
        "        if group_of_metric is None or getattr",
        "        if False and getattr",
        "tests/test_data.py",
    ),
    Mutant(
        "a metric keeps the group of an earlier strategy",
        "share_metrics",
        "getattr(metric, _SHARED_GROUP, None) == id(group_of_metric):",
        "False:",
        "tests/test_data.py",
    ),
    Mutant(
        "a gradient frozen before the replicas have summed it",
        "SteppingStrategy._follow_training_parameters",
        "        if within and (",
        "        if False and (",
        "tests/test_guards.py -k switches_between",
    ),
    Mutant(
        "a thaw voids the parts of gradients that wait to be summed",
        "SteppingStrategy._follow_training_parameters",
        "self._wrap_ddp(self._module, init_sync=False)",
        "self._wrap_ddp(self._module)",
        "tests/test_training.py -k thaw_between",
    ),
    Mutant(
        "grad_norm of gradients that no optimizer is given",
        "grad_norm",
        "    strategy.sync_others()\n",
        "",
        "tests/test_guards.py -k grad_norm",
    ),
    Mutant(
        "checkpoint of shards",
        "SavingStrategy.lightning_module_state_dict",
        "        return full_state_dict(record, self.root_device)",
        "        with record.allow_state_dict():\n            return super().lightning_module_state_dict()",
        "tests/test_checkpoint.py",
    ),
    Mutant(
        "moments of shards in the checkpoint",
        "SavingStrategy.optimizer_state",
        "        return full_optimizer_state(plain_optimizer(optimizer), record.layout, record.groups, self.root_device)",
        "        return super().optimizer_state(optimizer)",
        "tests/test_checkpoint.py",
    ),
    Mutant(
        "state_dict not guarded",
        "_guard.hook",
        "        if not record.reading:\n",
        "        if False:\n",
        "tests/test_checkpoint.py",
    ),
    Mutant(
        "losses of a replica not compared",
        "SteppingStrategy.pre_backward",
        "                check_loss(closure_loss, self.groups)\n",
        "",
        "tests/test_guards.py",
    ),
    Mutant(
        "padded positions of a packed encoder not zeroed",
        "ParallelTransformerEncoder.forward",
        "        out = out * (split(kept, 1, self.region.group) if self.region.sp else kept)\n",
        "        del kept\n",
        "tests/test_training.py",
    ),
    Mutant(
        "batches of a replica not compared",
        "SteppingStrategy._step",
        "            check_batch(args[0], self.groups, self.root_device, loop)\n",
        "",
        "tests/test_guards.py",
    ),
    Mutant(
        "readers of partial parameters not looked at",
        "SteppingStrategy.pre_backward",
        "                check_readers(closure_loss, record)\n",
        "",
        "tests/test_guards.py",
    ),
    Mutant(
        "ancestry of a column's input not looked at",
        "Observers.column_begins",
        "        check_ancestry(x, self._frames.current.sources, module)\n",
        "",
        "tests/test_guards.py",
    ),
    Mutant(
        "residual inside a gathering module not seen",
        "Observers.gathering_ended",
        "and gathers and passes_by_rows(out.grad_fn, gathers):",
        "and False:",
        "tests/test_guards.py",
    ),
    Mutant(
        "region may stay open",
        "SequenceRegion.check_closed",
        "        if self.frames.active:\n            self.reset()\n            raise self.frames.left_open()\n",
        "",
        "tests/test_guards.py",
    ),
    Mutant(
        "order of the axes reversed",
        "ProcessTopology.from_config",
        'names = config.order.split("-")',
        'names = config.order.split("-")[::-1]',
        "tests/test_topology.py",
    ),
    Mutant(
        "row-major strides in the wrong direction",
        "ProcessTopology._strides",
        "math.prod(self.dims[i + 1 :]) for i",
        "math.prod(self.dims[:i]) for i",
        "tests/test_topology.py",
    ),
    Mutant(
        "hop does not wrap around",
        "ProcessTopology.next_stage",
        "(self.get_stage(rank) + 1) % self.pipeline_size",
        "min(self.get_stage(rank) + 1, self.pipeline_size - 1)",
        "tests/test_topology.py",
    ),
    Mutant(
        "embedding group without its split rank",
        "ProcessTopology.embedding_ranks",
        "stages = {0, self.pipeline_size - 1} | ({split_rank} if split_rank is not None else set())",
        "stages = {0, self.pipeline_size - 1}",
        "tests/test_topology.py",
    ),
    Mutant(
        "interleaved layers in one piece",
        "ProcessTopology.stage_layers",
        "range((turn * stages + stage) * size, (turn * stages + stage + 1) * size)",
        "range((stage * rounds + turn) * size, (stage * rounds + turn + 1) * size)",
        "tests/test_topology.py",
    ),
    Mutant(
        "groups made from the first list",
        "ParallelGroups._make_axis_groups",
        "            ranks = tuple(self.ranks(axes)) if self._grid_rank >= 0 else (self._world_rank,)\n",
        "            ranks = tuple(self.topology.get_axis_comm_lists(*axes)[0])\n",
        "tests/test_groups.py",
    ),
    Mutant(
        "only members count their embedding group",
        "ParallelGroups._make_named_groups",
        "            if shared is None:\n",
        "            if shared is None and member:\n",
        "tests/test_groups.py",
    ),
    Mutant(
        "groups made anew under a dead one's name",
        "ParallelGroups.destroy",
        "            group.shutdown()\n",
        "            dist.destroy_process_group(group)\n",
        "tests/test_groups.py",
    ),
    Mutant(
        "a mapped grid's ranks sorted",
        "ParallelGroups._new",
        "sort_ranks=False",
        "sort_ranks=True",
        "tests/test_groups.py",
    ),
    Mutant(
        "message without its fix",
        "ParallelConfig.sizes_are_positive",
        "a size must be 1 or more; leave it out for {default}",
        "a size must be 1 or more",
        "tests/test_bad_input.py",
    ),
    Mutant(
        "synonyms forgotten",
        "nearest",
        "    if SYNONYMS.get(word) in known:\n",
        "    if word in known:\n",
        "tests/test_bad_input.py",
    ),
    Mutant(
        "ranks that disagree go on",
        "check_agreement",
        "    if int(extremes[0]) == -int(extremes[1]):\n",
        "    if int(extremes[0]) >= -int(extremes[1]):\n",
        "tests/test_agreement.py",
    ),
    Mutant(
        "plans and models not compared",
        "SeqParallelStrategy._parallelize",
        "        check_agreement(describe_model(module), self._world, self.root_device)\n",
        "",
        "tests/test_agreement.py",
    ),
    Mutant(
        "a broadcast batch without the reader's random streams",
        "BroadcastLoader.__iter__",
        "                set_streams(streams, _CPU)\n",
        "                pass\n",
        "tests/test_broadcast.py",
    ),
    Mutant(
        "a reader's failure kept to itself",
        "BroadcastLoader.__iter__",
        '                    message = [("failed", f"{type(error).__name__}: {error}", get_streams(_CPU))]\n',
        '                    told = [("end", None, get_streams(_CPU))]\n',
        "tests/test_broadcast.py",
    ),
    Mutant(
        "SIGTERM not heard in a collective",
        "SeqParallelLauncher.take_signals",
        "            self.watch.hear_signals(taken, self.cluster_environment.global_rank())\n",
        "",
        "tests/test_launch.py -k sigterm",
    ),
    Mutant(
        "signals of forked processes taken for the run's",
        "ChildWatch.hear_signals",
        "        os.register_at_fork(after_in_child=self._forget_signals)\n",
        "",
        "tests/test_launch.py -k forked",
    ),
    Mutant(
        "optimizers not compared",
        "SteppingStrategy._describe_training",
        "describe_optimizer(plain_optimizer(optimizer))",
        "type(plain_optimizer(optimizer)).__name__",
        "tests/test_agreement.py",
    ),
    Mutant(
        "batches compared by the run's steps alone",
        "SteppingStrategy._step",
        "if args and due:",
        "if args and schedule.is_due(loop):",
        "tests/test_guards.py",
    ),
    Mutant(
        "a sweep starts ranks",
        "TopologyStrategy._configure_launcher",
        "                refuse_sweep(self.num_nodes * self.num_processes)\n",
        "                pass\n",
        "tests/test_ways_in.py -k sweep",
    ),
    Mutant(
        "shared kv gradients not summed",
        "GradSync._sum_bucket",
        "        for part in shared:\n            part.take()\n",
        "        del shared\n",
        "tests/test_zoo.py tests/test_styles.py",
    ),
    Mutant(
        "a shared kv head counts twice in the norm",
        "global_grad_norm",
        "            grad = grad.index_select(shard.dim, is_first.nonzero().flatten().to(grad.device))\n",
        "",
        "tests/test_styles.py -k shared_parts",
    ),
    Mutant(
        "encoder states gathered backwards alone",
        "DataPath.copy",
        "        copied = copy_to_tensor_parallel_region(x, self.group)\n        self._frames.current.copied",
        "        copied = x.view_as(x)\n        self._frames.current.copied",
        "tests/test_zoo.py -k encoder_decoder",
    ),
    Mutant(
        "owners of blocks taken for blocks",
        "find_stacks",
        "len(calls) > 1 and not any(_holds_a_chain(trace, call, listed.values()) for call in calls)",
        "len(calls) > 1",
        "tests/test_infer.py -k own_a_chain",
    ),
    Mutant(
        "experts taken for a chain of blocks",
        "_holds_a_chain",
        "if before and trace.values[one.args[key]].root == trace.values[before.outputs[0]].root:",
        "if before:",
        "tests/test_infer.py -k outside_any_list",
    ),
    Mutant(
        "segments of a column share one count of units",
        "_FeatureSupport.units",
        "        return [self._units(column, start, stop) for start, stop, _ in segments]",
        "        return [self._units(column, 0, None)] * len(segments)",
        "tests/test_hf_uses.py -k infer-phi3-attentions",
    ),
    Mutant(
        "parameters that are added while training pass",
        "refuse_added",
        "    if any(record.layout.of(parameter) is None for parameter in parameters):",
        "    if False:",
        "tests/test_adapters.py -k known_not",
    ),
    Mutant(
        "losses do not ride along",
        "SteppingStrategy.pre_backward",
        "            self._sync.losses.note(closure_loss)\n",
        "",
        "tests/test_guards.py -k begins_to_read",
    ),
    Mutant(
        "outputs behind the last due step pass",
        "SteppingStrategy.on_predict_end",
        '        self._outputs.check(self.groups, "predict")\n',
        "",
        "tests/test_guards.py -k made_of_parts",
    ),
    Mutant(
        "thawed parameters are not averaged over replicas",
        "SteppingStrategy._follow_training_parameters",
        "        if thawed or frozen:",
        "        if frozen:",
        "tests/test_training.py -k thaw",
    ),
    Mutant(
        "gradients of replicas not compared",
        "SteppingStrategy.check_step",
        "            check_reduced(_parameters(optimizer), self.groups)\n",
        "",
        "tests/test_guards.py -k replicas",
    ),
    Mutant(
        "a replaced gradient taken for a part",
        "GradSync._arrival.hook",
        "            if not partial.fired and kept is not None:\n",
        "            if not partial.fired and kept is not None and kept is partial.synced:\n",
        "tests/test_training.py -k in_place_of_ours",
    ),
    Mutant(
        "a batch of ignored targets poisons the weights",
        "VocabParallelCrossEntropy.backward",
        ".masked_fill(~valid, 0)  # a mean",
        "  # infinite",
        "tests/test_logits.py",
    ),
    Mutant(
        "copies of shards pass for the whole",
        "_Swap.apply",
        "            plan.modules[name].__dict__[PART_KEY] = name\n",
        "            plan.modules[name].__dict__.pop(PART_KEY, None)\n",
        "tests/test_guards.py -k copies",
    ),
    Mutant(
        "the self-check passes everything",
        "self_check.compare_copies",
        "        verdict = compare_runs(dense, sharded, record, names, groups)\n",
        "        verdict = Verdict()\n",
        "tests/test_selfcheck.py",
    ),
    Mutant(
        "the self-check looks at the forward alone",
        "worst_gradient",
        "        if wrong and (worst is None or not gap <= worst.error):\n",
        "        if False:\n",
        "tests/test_selfcheck.py -k gradient",
    ),
    Mutant(
        "hooks that write rows of a weight pass by",
        "_names",
        "        if words.intersection(code.co_names):\n",
        "        if False:\n",
        "tests/test_found_vocabulary.py -k names_a_weight",
    ),
    Mutant(
        "hooks are asked for weights, and not what they call",
        "_names",
        "if not isinstance(called, types.FunctionType) or",
        "if True or",
        "tests/test_found_vocabulary.py -k names_a_weight",
    ),
    Mutant(
        "a training step that changes rows of a gradient passes by",
        "weight_reader",
        "if (runs or beside) and",
        "if runs and",
        "tests/test_found_vocabulary.py -k names_a_weight",
    ),
    Mutant(
        "a copy that is the model itself is moved",
        "_refuse_shared",
        "        if id(parameter) in own:\n",
        "        if False:\n",
        "tests/test_infer.py -k own_copy",
    ),
    Mutant(
        "who reads logits alone waits for ever",
        "ShardedLogits._meet",
        "        if self._meeting is not None:\n",
        "        if False:\n",
        "tests/test_logits.py -k alone",
    ),
    Mutant(
        "a replica whose self-check fails goes on alone",
        "_share_verdict",
        "groups[tuple(sorted(groups.topology.axes))]",
        'groups["tp"]',
        "tests/test_selfcheck.py -k replica",
    ),
    Mutant(
        "large models are copied whole",
        "Reduction.variants",
        "        return [one for at, one in enumerate(found) if one not in found[:at]]\n",
        "        return [Reduction()]\n",
        "tests/test_start_memory.py",
    ),
    Mutant(
        "the self-check keeps its copies",
        "release",
        "    for parameter in copied.parameters():\n",
        "    for parameter in ():\n",
        "tests/test_start_memory.py",
    ),
    Mutant(
        "a change through a plain view of sharded logits is lost",
        "ShardedLogits._written",
        "if self._changed is None and self._shown is not None and",
        "if False and",
        "tests/test_logits.py -k do_with",
    ),
    Mutant(
        "a weight whose gradient a hook of the user's changes is sharded",
        "_why_whole",
        "if has_tensor_hooks(parameter):",
        "if False:",
        "tests/test_found_vocabulary.py -k reason",
    ),
    Mutant(
        "the self-check skips a kind of block",
        "share_equal_blocks",
        "            kind = kind_of(block, decisive), told, bool(rules) and name == last\n",
        "            kind = type(block), told, bool(rules) and name == last\n",
        "tests/test_reduction.py",
    ),
    Mutant(
        "the self-check skips blocks that the plan treats in another way",
        "share_equal_blocks",
        "            kind = kind_of(block, decisive), told, bool(rules) and name == last\n",
        "            kind = kind_of(block, decisive), name == last\n",
        "tests/test_reduction.py tests/test_selfcheck.py -k plan",
    ),
    Mutant(
        "blocks that decide by their index pass for equal ones",
        "_names_decided_by",
        "method.args.args[0].arg and _decides(node, around)",
        "method.args.args[0].arg and False",
        "tests/test_reduction.py -k index",
    ),
    Mutant(
        "blocks that differ in a function, a tuple or a config pass for equal ones",
        "kind_of",
        "(key, _setting(value))",
        "(key, value if isinstance(value, bool | int | float | str) else None)",
        "tests/test_reduction.py -k different",
    ),
    Mutant(
        "frozen blocks pass for equal to those that train",
        "kind_of",
        "(n, tuple(t.shape), t.requires_grad)",
        "(n, tuple(t.shape))",
        "tests/test_reduction.py -k different",
    ),
    Mutant(
        "calls that tell a block to do something else are skipped",
        "_Repeat.__call__",
        "        form = _form((args, kwargs))\n",
        "        form = None\n",
        "tests/test_reduction.py -k form",
    ),
    Mutant(
        "parts of a block that is computed are skipped",
        "Repeats._find",
        "if id(module) not in inner and len(",
        "if len(",
        "tests/test_reduction.py -k form",
    ),
    Mutant(
        "what stands between blocks gets no gradient in the self-check",
        "_passed_through",
        "    return passed if first is out else type(out)((passed, *out[1:]))\n",
        "    return out\n",
        "tests/test_reduction.py -k form",
    ),
    Mutant(
        "behind each block of a reduced copy activations may become whole",
        "share_equal_blocks",
        ", told, bool(rules) and name == last\n",
        ", told\n",
        "tests/test_reduction.py -k once",
    ),
    Mutant(
        "classes of modules without a file pass for installed ones",
        "ContentDigest._class",
        "(file or not _has_users_code(value))",
        "True",
        "tests/test_proof_cache.py -k without_a_file",
    ),
    Mutant(
        "a look at the data uses up its generators and counters",
        "_state_kept",
        "        for put_back in back:\n",
        "        for put_back in ():\n",
        "tests/test_infer.py -k look",
    ),
    Mutant(
        "what a step does to its batch is done to all later runs",
        "_own_tensors",
        "tensor.clone()",
        "tensor",
        "tests/test_trainer_view.py -k batch",
    ),
    Mutant(
        "weak references and closures of a copy lead to the model itself",
        "detached_copy",
        "    _point_to_copy(model, copied, memo)\n",
        "",
        "tests/test_trainer_view.py -k roundabout",
    ),
    Mutant(
        "the self-check computes equal blocks for the first input alone",
        "_begin_again",
        "        repeat.calls.clear()\n",
        "        repeat.calls.copy()\n",
        "tests/test_reduction.py -k twice",
    ),
    Mutant(
        "a short vocabulary has another remainder",
        "_short_vocabularies",
        "* tp + rows % tp",
        "* tp",
        "tests/test_reduction.py -k remainders",
    ),
    Mutant(
        "experts share the weights of one",
        "stacks",
        "if kinds.count(type(block)) > 1:",
        "if False:",
        "tests/test_reduction.py -k experts",
    ),
    Mutant(
        "small gradients may be twice too large",
        "worst_gradient",
        "(own > OWN_LIMIT and gap > NOISE[narrow])",
        "False",
        "tests/test_selfcheck.py -k small",
    ),
    Mutant(
        "a proof holds for another model",
        "Prover._key",
        "return fingerprint(self._module, ",
        "return fingerprint(LightningModule(), ",
        "tests/test_selfcheck.py -k remembered_once",
    ),
    Mutant(
        "head counts never found",
        "find_edits",
        "            return [*norms, *_needed(block, groups, tp, edits, chosen)]\n",
        "            return []\n",
        "tests/test_infer.py tests/test_zoo.py",
    ),
    Mutant(
        "one rank rehearsed for all",
        "rehearse",
        "    for rank in range(tp):\n        try:\n",
        "    for rank in range(1):\n        try:\n",
        "tests/test_infer.py tests/test_zoo.py",
    ),
    Mutant(
        "every rank draws the same masks",
        "_reseed",
        'salt=rank.to_bytes(4, "little")',
        'salt=b"0"',
        "tests/test_rng_streams.py",
    ),
    Mutant(
        "a metric that reads logits first cuts the loss off",
        "ShardedLogits.local",
        "if made.requires_grad or not (graph or made.is_inference())",
        "if made is not None",
        "tests/test_logits.py",
    ),
    Mutant(
        "logits made without gradients teach the head",
        "ShardedLogits._wrap",
        "            part = part.detached()\n",
        "            pass\n",
        "tests/test_logits.py",
    ),
    Mutant(
        "layers that were wrapped after weights_from are drawn",
        "LateWeights._source_of",
        "known if known or isinstance(tensor, nn.Parameter) else [inner]",
        "[inner]",
        "tests/test_late_weights.py -k adapters",
    ),
    Mutant(
        "copies of what files fill have numbers of the initialisation",
        "DeferredInit.check",
        "if taken := {key for key in taken if at >= elsewhere[key][1]}:",
        "if taken := set():",
        "tests/test_late_weights.py -k became",
    ),
    Mutant(
        "numbers within objects are written as zeros",
        "_fill_within",
        "place.untyped_storage().copy_(value.untyped_storage())",
        "pass",
        "tests/test_convert.py -k within",
    ),
    Mutant(
        "infinite scores hide an output that differs",
        "OutputWatch.note",
        "norm = leaf.double().nan_to_num(0.0, 0.0, 0.0).norm()",
        "norm = leaf.double().nan_to_num().norm()",
        "tests/test_compared_batches.py",
    ),
    Mutant(
        "batches of mappings not looked at",
        "_items",
        "    if isinstance(leaf, Mapping):\n",
        "    if isinstance(leaf, dict):\n",
        "tests/test_batch.py",
    ),
    Mutant(
        "the same values in another order are the same batch",
        "checksum",
        "total += (bits * position).sum()",
        "total += bits.sum()",
        "tests/test_batch.py",
    ),
    Mutant(
        "a token outside the vocabulary is embedded as zeros",
        "VocabParallelEmbedding.forward",
        "elif not bool(inside.all()):",
        "elif False:",
        "tests/test_styles.py -k outside",
    ),
    Mutant(
        "a writer on one rank gets logits in parts",
        "SteppingStrategy._step",
        "out = map_tensors(whole_logits, out)",
        "out = map_tensors(lambda x: x, out)",
        "tests/test_data.py -k logits",
    ),
    Mutant(
        "a weight that the model's own code reads may be in the loss",
        "check_readers",
        "if layout.is_sharded and layout.free and record.on_shard(layout.name)",
        "if False",
        "tests/test_guards.py -k refused",
    ),
    Mutant(
        "no largest gradient where a rank counts none of a tensor",
        "global_grad_norm.power",
        "grad if grad.numel() else grad.new_zeros(1)",
        "grad",
        "tests/test_styles.py -k norms_of",
    ),
    Mutant(
        "products wait for the shortest collectives",
        "SavePolicy.overlaps",
        'return whole_bytes > self.overlap_from or self.regather != "auto"',
        "return True",
        "tests/test_overlap.py -k long_enough",
    ),
    Mutant(
        "whole activations dropped out apart",
        "RngScope.begin_gathering",
        "            self.streams.pause()\n",
        "            pass\n",
        "tests/test_random.py -k function_drops",
    ),
    Mutant(
        "every step draws the same masks",
        "RankStreams._end",
        "        _advance(used)\n",
        "",
        "tests/test_rng_streams.py",
    ),
    Mutant(
        "padding of the vocabulary not cut off",
        "ShardedLogits.whole",
        "local.ndim - 1, self._group, self._shard.length)",
        "local.ndim - 1, self._group)",
        "tests/test_logits.py",
    ),
    Mutant(
        "a stand-in that is zero",
        "stand_in:stand_in",
        'new_full((), float("nan"))',
        "new_full((), 0.0)",
        "tests/test_styles.py -k stand_in",
    ),
    Mutant(
        "flattened tokens folded the wrong way round",
        "FrameStack.fold",
        "        sizes = (of.batch, positions) if self._dim == 1 else",
        "        sizes = (of.batch, positions) if self._dim == 0 else",
        "tests/test_products.py",
    ),
    Mutant(
        "a bias added to partial sums by every rank",
        "begin_sum.hook",
        "parameter * 0.0",
        "parameter * 1.0",
        "tests/test_products.py",
    ),
    Mutant(
        "an expert's row bias added by every rank",
        "RowParallelLinear.forward",
        "float(self.region.rank == 0)",
        "1.0",
        "tests/test_products.py",
    ),
    Mutant(
        "what a module sums is let go of before it is reduced",
        "_Swap._hooks",
        "            for rule in reversed(rules):\n",
        "            for rule in rules:\n",
        "tests/test_products.py",
    ),
    Mutant(
        "counts of heads read off tensors that are cut already",
        "_Swap.apply",
        "sorted(plan.decided, key=lambda match: match.of_tensor)",
        "sorted(plan.decided, key=lambda match: not match.of_tensor)",
        "tests/test_resolve.py",
    ),
    Mutant(
        "a column with one unit gets the style of an earlier rule",
        "PlannedModel.drop",
        "        self._dropped.add((rule.slot or rule.style, name))\n",
        "",
        "tests/test_resolve.py",
    ),
    Mutant(
        "an earlier rule wins over a later one",
        "PlannedModel._decide",
        "                last[rule.slot or rule.style, match.name, at if rule.accumulates else -1] = match\n",
        "                last.setdefault((rule.slot or rule.style, match.name, at if rule.accumulates else -1), match)\n",
        "tests/test_resolve.py",
    ),
    Mutant(
        "of several rules that set attributes the last alone holds",
        "PlannedModel._decide",
        "at if rule.accumulates else -1",
        "-1",
        "tests/test_resolve.py",
    ),
    Mutant(
        "a row that its module multiplies itself is never reduced",
        "RowRule.place",
        "        if name not in plan.modules:\n",
        "        if False:\n",
        "tests/test_resolve.py",
    ),
    Mutant(
        "a whole expert among sharded ones accepted",
        "_check_siblings",
        "if twin in plan.modules and twin not in linears:",
        "if twin not in plan.modules:",
        "tests/test_products.py",
    ),
    Mutant(
        "an expert without tokens in the example left whole",
        "BlockPlanner.make",
        "        self._plan.rules += _idle_experts(self._model, self._flow, self._plan.rules)\n",
        "",
        "tests/test_products.py",
    ),
    Mutant(
        "routing weights summed in less precision than the activation",
        "_widest",
        "if len(kinds) > 1 else None",
        "if len(kinds) > 9 else None",
        "tests/test_products.py",
    ),
    Mutant(
        "what a module adds to a sum not looked at",
        "Observers.sum_returned",
        "        PartialSumCheck(self._frames.current.partial_nodes, rows, once).check(out, gathers, module)\n",
        "",
        "tests/test_products.py",
    ),
    Mutant(
        "a loss that reads a router inside a sum not seen",
        "LossLeakCheck.check",
        "            if node in owners:\n",
        "            if False:\n",
        "tests/test_products.py",
    ),
    Mutant(
        "an escaping balance not seen in the data flow",
        "GatherPoints._find_dealer",
        "                if self._escapes(call):\n                    return False\n",
        "",
        "tests/test_products.py",
    ),
    Mutant(
        "places in a queue counted on shards",
        "BlockPlanner._keep_whole_sequences",
        "if (counted := orders_tokens(self._trace, self._flow, self._covers)) is not None:",
        "if (counted := orders_tokens(self._trace, self._flow, self._covers)) is not None and False:",
        "tests/test_products.py",
    ),
    Mutant(
        "tokens in another order not seen",
        "BlockPlanner._keep_whole_sequences",
        "if (moved := reorders_tokens(self._trace, self._flow)) is not None:",
        "if (moved := reorders_tokens(self._trace, self._flow)) is not None and False:",
        "tests/test_products.py",
    ),
    Mutant(
        "buffers that the forward changes not looked at",
        "compare_runs",
        "    verdict.wrong += _wrong_buffers(dense, sharded, record, limit, groups)\n",
        "",
        "tests/test_products.py",
    ),
    Mutant(
        "modules that the example does not run not looked at",
        "compare_runs",
        "    verdict.wrong += _unproved_modules(dense, record)\n",
        "",
        "tests/test_products.py",
    ),
    Mutant(
        "parameters that the example does not use guessed at",
        "BlockPlanner._plan_products",
        "            products.check_used()\n",
        "            pass\n",
        "tests/test_products.py",
    ),
    Mutant(
        "draws behind an expert's first linear accepted",
        "DrawContext.check",
        "        if self.widths is not None and self.own and",
        "        if False and self.own and",
        "tests/test_products.py",
    ),
    Mutant(
        "padding of the vocabulary counted in the loss",
        "_LogitChunks.logits",
        "return self._x[some, : self.count]",
        "return self._x[some]",
        "tests/test_logits.py",
    ),
    Mutant(
        "padding of the vocabulary given a gradient",
        "_ChunkGrads.__init__",
        "of_x[:, rows.count :] = 0",
        "of_x[:, rows.count :] = 1",
        "tests/test_logits.py",
    ),
    Mutant(
        "a norm's changed output made again unchanged",
        "norm_recompute:norm_of",
        "return call if call is not None and x._version == call.version else None",
        "return call",
        "tests/test_lean.py",
    ),
    Mutant(
        "a norm that draws run again",
        "norm_recompute:_try",
        "if not same or drawn or noted or first.data_ptr() == x.data_ptr():",
        "if type(first) is not Tensor:",
        "tests/test_lean.py",
    ),
    Mutant(
        "a norm run again outside its autocast",
        "NormCall._run",
        "        with self._autocast.again():\n            leaf, leaves, out =",
        "        if True:\n            leaf, leaves, out =",
        "tests/test_lean.py",
    ),
    Mutant(
        "a stretch that was changed in place made again",
        "ElementwiseRecompute.close",
        "gained = done and alone and not self._spoiled and self._is_intact() and self._settle()",
        "gained = done and alone and self._settle()",
        "tests/test_lean.py",
    ),
    Mutant(
        "a column changed behind its row not seen",
        "ElementwiseRecompute._replay",
        "if tensor._version != self._versions[at]:",
        "if False:",
        "tests/test_lean.py",
    ),
    Mutant(
        "a stretch under activation checkpointing",
        "ElementwiseRecompute.open",
        "if is_of_checkpoint(outer) or not saved_tensor_hooks_allowed():",
        "if False:",
        "tests/test_lean.py",
    ),
    Mutant(
        "more is kept where somebody looks",
        "ElementwiseRecompute.open",
        "if is_of_checkpoint(outer) or",
        "if (outer is not None and not hasattr(getattr(outer[0], '__self__', None), 'is_transparent')) or",
        "tests/test_overlap.py -k who_looks",
    ),
    Mutant(
        "hooks of others see what is not kept",
        "ElementwiseRecompute._pack",
        "elif self.outer_hooks is not None:",
        "if self.outer_hooks is not None:",
        "tests/test_lean.py",
    ),
    Mutant(
        "hooks of others get nothing to keep",
        "_SavedTensor.hand_over",
        "if tensor is not None and tensor._version == self._version:",
        "if False:",
        "tests/test_lean.py",
    ),
    Mutant(
        "what others moved is read as if it lay as before",
        "HandedOverSource.take",
        "if lies and tensor.storage_offset() == 0:",
        "if True:",
        "tests/test_lean.py",
    ),
    Mutant(
        "hooks of others stay behind when their context is left",
        "ElementwiseRecompute.open",
        """        if outer is not None:
            pop_saved_tensor_hooks()
""",
        "",
        "tests/test_lean.py",
    ),
    Mutant(
        "gradients compared by their beginning",
        "grad_checks:_norm",
        "for part in flat.split(block)]",
        "for part in flat.split(block)[:1]]",
        "tests/test_grad_sync.py -k compare",
    ),
    Mutant(
        "a thread stays behind a phase",
        "Phases.phase",
        "            timer.cancel()\n            timer.join()\n",
        "",
        "tests/test_phases.py",
    ),
    Mutant(
        "a phase is told on every rank",
        "Phases.phase",
        "if not self._shows:",
        "if False:",
        "tests/test_phases.py",
    ),
    Mutant(
        "who looked once decides for good",
        "ElementwiseSpans._end",
        "for column in self._columns if not span.was_disturbed else ():",
        "for column in self._columns:",
        "tests/test_lean.py",
    ),
    Mutant(
        "what is drawn in a stretch drawn again",
        "REPLAYED",
        "REPLAYED = frozenset((*_ARITHMETIC, *_ACTIVATIONS, *_SHAPES))",
        'REPLAYED = frozenset((*_ARITHMETIC, *_ACTIVATIONS, *_SHAPES, "rand_like"))',
        "tests/test_lean.py",
    ),
    Mutant(
        "a whole gradient summed again by ranks that add nothing",
        "GradSync._own_term",
        "if not partial.fired:  # whole on every rank since the last sum",
        "if False:",
        "tests/test_grad_sync.py",
    ),
    Mutant(
        "each rank's own largest logit taken for all",
        "VocabParallelCrossEntropy.forward",
        "total = (parts[:, 1] * below.exp()).sum(0)",
        "total = parts[:, 1].sum(0)",
        "tests/test_logits.py",
    ),
    Mutant(
        "the head's gradient of the last chunk alone",
        "_ChunkGrads.add",
        "of_head[: rows.count] += d.t()",
        "of_head[: rows.count] = d.t()",
        "tests/test_logits.py",
    ),
    Mutant(
        "a gathered input that was changed taken for the gathered one",
        "ColumnInputs.find_regathered",
        "read is None or read.handle is None or x._version != read.version:",
        "read is None or read.handle is None:",
        "tests/test_layers.py",
    ),
    Mutant(
        "weight-grad products made before their collective starts",
        "defer_wgrad",
        "    set_sequence_nr(given, number)\n",
        "",
        "tests/test_overlap.py",
    ),
    Mutant(
        "a collective waited for where it starts",
        "_over",
        "        set_sequence_nr(waits, max(number - 1, 0))\n",
        "        set_sequence_nr(waits, number + 2)\n",
        "tests/test_overlap.py",
    ),
    Mutant(
        "the columns' products left out of the gradient of their input",
        "BackwardExchange.add_product",
        "            total.addmm_(grad, right)",
        "            pass",
        "tests/test_overlap.py tests/test_zoo.py tests/test_parity.py",
    ),
    Mutant(
        "two pauses of one block share a state",
        "RankStreams._resume",
        "            _advance([True] * len(now))  # the next pause begins at a state of its own\n",
        "",
        "tests/test_rng_streams.py",
    ),
    Mutant(
        "a recompute that begins behind a pause goes on with its stream",
        "RankStreams._resume",
        '        if moved or where != "end":\n',
        "        if False:\n",
        "tests/test_rng_streams.py",
    ),
    Mutant(
        "a checkpoint's dropout kept as bytes",
        "ElementwiseRecompute._dropout",
        "if top is None or top[0] != self._pack:",
        "if False:",
        "tests/test_random.py",
    ),
    Mutant(
        "what a backward left is not let go",
        "PerBackward.take",
        "return self._values.pop(current_backward(), None)",
        "return self._values.get(current_backward())",
        "tests/test_overlap.py",
    ),
    Mutant(
        "a backward in a hook shares the place of the outer one",
        "PerBackward.put",
        "self._values[current_backward()] = value",
        "self._values = {current_backward(): value}",
        "tests/test_overlap.py",
    ),
    Mutant(
        "what a backward in a hook gathered is not gathered again",
        "RegatheredInput.take",
        "        self.start(kept)  # does nothing, unless a hook ran another backward in between\n",
        "",
        "tests/test_overlap.py",
    ),
    Mutant(
        "a checkpoint's input taken for its norm's",
        "NormCall.source",
        " and is_same_keeper(self._keeper) else None",
        " else None",
        "tests/test_overlap.py",
    ),
    Mutant(
        "a checkpoint's input taken for what was gathered outside",
        "ColumnInputs.find_regathered",
        "return read.handle if is_same_keeper(read.handle.keeper) else None",
        "return read.handle",
        "tests/test_overlap.py",
    ),
    Mutant(
        "a checkpoint is held by its norms",
        "keeper",
        "weakref.ref(pack) if inspect.isfunction(pack) else pack",
        "pack",
        "tests/test_overlap.py",
    ),
    Mutant(
        "gradients added to weights that were frozen since",
        "kept_grad",
        "or not ctx.is_plain or not weight.requires_grad:",
        "or not ctx.is_plain:",
        "tests/test_overlap.py",
    ),
    Mutant(
        "gradients pass by the hooks of their node",
        "kept_grad",
        "has_tensor_hooks(weight) or has_node_hooks(node):",
        "has_tensor_hooks(weight):",
        "tests/test_overlap.py",
    ),
    Mutant(
        "the gradient of a weight's gradient lost on its way round",
        "ShardedLinear.backward",
        "if ctx.late is not None and ctx.is_plain:",
        "if ctx.late is not None:",
        "tests/test_overlap.py",
    ),
    Mutant(
        "columns that a backward does not come to are waited for",
        "BackwardExchange._count",
        "return sum(will_run(node) for node in nodes)",
        "return len(nodes)",
        "tests/test_overlap.py",
    ),
    Mutant(
        "draws between a column and its row not looked at",
        "DrawContext.check",
        "        if self.tokens is not None and self.own:",
        "        if self.tokens is not None and self.own and not shape:",
        "tests/test_random.py",
    ),
    Mutant(
        "draws behind a row, inside the module, not looked at",
        "DrawContext._check_positions",
        "if self.in_block and self.own and not shards.has_positions(shape):",
        "if self.in_block and self.own and not self.in_gather and not shards.has_positions(shape):",
        "tests/test_random.py",
    ),
    Mutant(
        "whole features behind the first of two rows drawn by each rank",
        "DrawContext._check_features",
        "shape[-1:] == (self.previous_row_width,)",
        "not shape",
        "tests/test_random.py",
    ),
    Mutant(
        "another path's features behind a row drawn alike",
        "check_alike",
        "if shape[-1] == local or shape[-1] != behind:",
        "if shape[-1] == local == behind:",
        "tests/test_random.py",
    ),
    Mutant(
        "dropout of a whole activation behind a column drawn by each rank",
        "draw_alike.before",
        "(always or reads_whole(args))",
        "always",
        "tests/test_random.py -k whole",
    ),
    Mutant(
        "a recompute forgets that a dropout was of a whole activation",
        "draw_alike.before",
        "switched.append(recomputes or (",
        "switched.append((",
        "tests/test_random.py -k whole",
    ),
    Mutant(
        "the self-check does not look at what is drawn",
        "_wrong_draws",
        "if (whole == shape) is not draw.own:",
        "if (whole == shape) is not None:",
        "tests/test_random.py -k self_check",
    ),
    Mutant(
        "shards tell their own shapes to configure_optimizers",
        "_WholeShapes.__torch_function__",
        "        if asked is None or found is None or not found.is_sharded:",
        "        if True:",
        "tests/test_training.py -k follow",
    ),
    Mutant(
        "configure_optimizers sees our classes",
        "_as_own",
        "    module.__class__ = one.own\n",
        "    pass\n",
        "tests/test_training.py -k follow",
    ),
    Mutant(
        "a forward's outputs weighed by what is drawn",
        "_project",
        "    weights = (places * 12.9898).sin().view(tensor.shape)\n",
        "    weights = torch.randn(tensor.shape, dtype=torch.float64)\n",
        "tests/test_selfcheck.py -k weighed",
    ),
    Mutant(
        "an optimizer that comes later not looked at",
        "SteppingStrategy.optimizers",
        "refuse_optimizers(plain, self._shards if plain else 1)",
        "refuse_optimizers(plain, 1)",
        "tests/test_guards.py -k refused",
    ),
    Mutant(
        "an optimizer that nobody told of steps on shards",
        "SeqParallelStrategy.setup",
        "            self._watch_all_steps()\n",
        "",
        "tests/test_guards.py -k refused",
    ),
    Mutant(
        "parameters of no module not compared",
        "check_replicated",
        "        if found is None or not found.is_sharded:",
        "        if found is not None and not found.is_sharded:",
        "tests/test_guards.py -k refused",
    ),
    Mutant(
        "ranks that hold the same value heads drop them apart",
        "_is_drawn_by_several",
        "part != size and part * ranks > size and not is_sequence(at, size)",
        "part != size and part * ranks < size and not is_sequence(at, size)",
        "tests/test_random.py -k share_value",
    ),
    Mutant(
        "an order of samples taken for no draw",
        "DRAWS",
        '    "randperm",\n',
        "",
        "tests/test_random.py -k keeps_whole",
    ),
    Mutant(
        "a generator of the user's own taken for the rank's, before training",
        "_Observer.__torch_dispatch__",
        "own = not drawn.seeded and any(region.streams.own for region in self._regions)",
        "own = any(region.streams.own for region in self._regions)",
        "tests/test_random.py -k ones_own_for_features",
    ),
    Mutant(
        "a generator of the user's own taken for the rank's, in training",
        "DrawContext.check",
        "if draw.seeded and self.own:",
        "if draw.seeded and not self.own:",
        "tests/test_random.py -k begins_late",
    ),
    Mutant(
        "a block that reduces over its shard not seen",
        "_ordered_dims",
        "if name not in (*_ORDERED, *_REDUCING)",
        "if name not in _ORDERED",
        "tests/test_products.py -k orders_tokens",
    ),
    Mutant(
        "a stack whose last block is left out ends on shards",
        "close_call.hook",
        "whole = region.leave_early(out) if at_block and out is not None else None",
        "whole = None",
        "tests/test_training.py -k left_out",
    ),
    Mutant(
        "a norm behind blocks that are all left out sees whole activations",
        "DataPath.enter_last",
        "return x if self._frames.active or self._frames.recomputes else self.enter(x, module)",
        "return x",
        "tests/test_training.py -k left_out",
    ),
    Mutant(
        "a rank that fails alone in the self-check waits for ever",
        "_share_verdict",
        "    _await_others(failure, groups[tuple(sorted(groups.topology.axes))])\n",
        "",
        "tests/test_selfcheck.py -k alone",
    ),
    Mutant(
        "a rate that rises from zero goes unseen",
        "WatchSchedule.note_draws",
        "self._draws_are_new = hash(drawn) not in self._known_draws",
        "self._draws_are_new = False",
        "tests/test_random.py",
    ),
    Mutant(
        "stochastic depth on the rank's own stream without sp",
        "_Swap._hook_dropouts",
        "if (stochastic or isinstance(module, _DropoutNd)) and any(",
        "if (stochastic and self.plan.sp_at(name) or isinstance(module, _DropoutNd)) and any(",
        "tests/test_random.py",
    ),
    Mutant(
        "a loss that begins to read a norm goes unseen",
        "SteppingStrategy.pre_backward",
        "check_readers(closure_loss, record, inside=False)",
        "check_readers(closure_loss, record, inside=True) if False else None",
        "tests/test_guards.py",
    ),
    Mutant(
        "clipping in hooks goes unseen between due steps",
        "SteppingStrategy._note_hooks",
        "or any(is_overridden(hook, module) for hook in own)",
        "or False",
        "tests/test_guards.py",
    ),
    Mutant(
        "clipping in callbacks goes unseen between due steps",
        "SteppingStrategy._note_hooks",
        "or any(is_overridden(hook, each, Callback) for hook in _BEHIND_BACKWARD for each in callbacks)",
        "or False",
        "tests/test_guards.py",
    ),
    Mutant(
        "gathered arguments widened to the widest",
        "hooks:gather_arguments.hook",
        "                    whole = whole.to(x.dtype)",
        "                    pass",
        "tests/test_parallelize.py",
    ),
    Mutant(
        "zeros where the output of a column has no gradient",
        "ShardedLinear.forward",
        "        ctx.set_materialize_grads(False)\n        dtype = _autocast_dtype(x)\n        ctx.late",
        "        dtype = _autocast_dtype(x)\n        ctx.late",
        "tests/test_overlap.py",
    ),
    Mutant(
        "columns' sum waits for one that has no gradient",
        "ShardedLinear._skip",
        "total = ctx.slot.skip_product()",
        "pass",
        "tests/test_overlap.py",
    ),
    Mutant(
        "zeros where the output of a norm has no gradient",
        "_Norm.forward",
        "        ctx.set_materialize_grads(False)\n        ctx.call = call\n",
        "        ctx.call = call\n",
        "tests/test_overlap.py",
    ),
    Mutant(
        "zeros where the output of a row has no gradient",
        "_ReduceScatterOver.forward",
        "        ctx.set_materialize_grads(False)\n        ctx.slot, ctx.dim, ctx.group, ctx.length",
        "        ctx.slot, ctx.dim, ctx.group, ctx.length",
        "tests/test_overlap.py",
    ),
    Mutant(
        "zeros where the output of a row that makes little has no gradient",
        "_ReduceScatter.forward",
        "        ctx.set_materialize_grads(False)\n        ctx.dim, ctx.group, ctx.length = dim, group, x.shape[dim]\n        return reduce_scatter(",
        "        ctx.dim, ctx.group, ctx.length = dim, group, x.shape[dim]\n        return reduce_scatter(",
        "tests/test_overlap.py -k nothing_waits",
    ),
    Mutant(
        "what was gathered again is not let go after its last user",
        "RegatheredInput._end",
        "            self._whole, self._task = None, NO_BACKWARD",
        "            self._task = NO_BACKWARD",
        "tests/test_overlap.py",
    ),
    Mutant(
        "the result of a collective that was started not taken",
        "BackwardExchange.take",
        "        return grad if pending is None else pending.wait()\n",
        "        return grad\n",
        "tests/test_overlap.py",
    ),
    Mutant(
        "gradients added in place past a hook",
        "kept_grad",
        "if has_tensor_hooks(weight) or has_node_hooks(node):",
        "if False:",
        "tests/test_overlap.py",
    ),
    Mutant(
        "gradients added in place where torch.autograd.grad was asked for them",
        "kept_grad",
        "    except RuntimeError:  # torch.autograd.grad was asked for this weight\n        return None\n",
        "    except RuntimeError:\n        return kept\n",
        "tests/test_overlap.py",
    ),
    Mutant(
        "an input gathered for another backward is used",
        "RegatheredInput._begin",
        "        if self._task != task:\n",
        "        if False:\n",
        "tests/test_overlap.py",
    ),
    Mutant(
        "a norm's input changed before its output is used",
        "NormCall.source",
        "x._version == self._read and is_same_keeper",
        "is_same_keeper",
        "tests/test_lean.py",
    ),
    Mutant(
        "another tensor's gradient lost in a norm",
        "norm_recompute:_try",
        "    return not _reads_others(out, [leaf, *leaves])\n",
        "    return bool(leaves) and leaf is not out\n",
        "tests/test_lean.py",
    ),
    Mutant(
        "a stretch read as another type made again as its own",
        "ElementwiseRecompute._settle",
        "        self._keep_odd_views()\n",
        "",
        "tests/test_lean.py",
    ),
    Mutant(
        "arguments that change later replayed",
        "ElementwiseRecompute._note",
        "if not all(isinstance(value, Tensor) or is_constant(value) for value in (*args, *kwargs.values())):",
        "if False:",
        "tests/test_lean.py",
    ),
    Mutant(
        "a stretch under a mode that changes results",
        "ElementwiseRecompute.open",
        "        if function_mode() is not None:\n",
        "        if False:\n",
        "tests/test_lean.py",
    ),
    Mutant(
        "logits made of weights that have changed",
        "DeferredLogits.check",
        "if self._read_versions() != self._versions:",
        "if False:",
        "tests/test_logits.py",
    ),
    Mutant(
        "logits gathered for the loss",
        "_KEEPING",
        "    F.cross_entropy: _loss,\n",
        "",
        "tests/test_logits.py",
    ),
    Mutant(
        "logits changed in place in a copy",
        "ShardedLogits.__torch_function__",
        "if logits is not None and writes:",
        "if False:",
        "tests/test_logits.py",
    ),
    Mutant(
        "the gradient of gathered logits not dealt out",
        "_Wrap.backward",
        "own = F.pad(grad[..., start:stop], (0, ctx.width - (stop - start)))",
        "own = F.pad(grad[..., : stop - start], (0, ctx.width - (stop - start)))",
        "tests/test_logits.py",
    ),
    Mutant(
        "buffers that ranks hold apart not seen",
        "SteppingStrategy.pre_backward",
        "                check_buffers(record, self.groups, self.root_device)\n",
        "",
        "tests/test_products.py",
    ),
    Mutant(
        "frozen rows not marked",
        "PartialSumCheck._is_row",
        " or is_node_of(end, MarkRow) for end in ends)",
        " for end in ends)",
        "tests/test_products.py",
    ),
    Mutant(
        "a turned activation of equal dims not seen",
        "reorders_tokens",
        "                if turned:\n                    return name\n",
        "",
        "tests/test_products.py",
    ),
    Mutant(
        "draws beside raw parameters accepted",
        "DrawContext.check",
        "        if self.unwrapped:\n            raise",
        "        if False:\n            raise",
        "tests/test_products.py",
    ),
    Mutant(
        "a latent projection that all heads share dealt out",
        "_FeatureSupport.is_shared",
        "            owners = owners[owners > 0]\n",
        "            pass\n",
        "tests/test_infer.py",
    ),
    Mutant(
        "a tied gradient counted twice",
        "VocabParallelEmbedding.forward",
        "return reduce_from_tensor_parallel_region(out, group)",
        "return reduce_from_tensor_parallel_region(copy_to_tensor_parallel_region(out, group), group)",
        "tests/test_vocabulary.py",
    ),
    Mutant(
        "a target outside its rank's part of the vocabulary",
        "VocabParallelCrossEntropy.forward",
        "score = (parts[:, 2] + below).gather(0, owner.unsqueeze(0)).squeeze(0)",
        "score = (parts[:, 2] + below)[0]",
        "tests/test_logits.py tests/test_vocabulary.py",
    ),
    Mutant(
        "a change of a view of logits stays in the view",
        "ShardedLogits._root",
        "while root._view_of is not None:",
        "while False:",
        "tests/test_logits.py",
    ),
    Mutant(
        "a copy of logits changes with them",
        "ShardedLogits._note_view",
        "if storage_id(made._outline) == storage_id(self._outline):",
        "if True:",
        "tests/test_logits.py",
    ),
    Mutant(
        "a change of logits in place is left out of a gradient",
        "_Wrap.backward",
        "if ctx.state.any():",
        "if False:",
        "tests/test_logits.py",
    ),
    Mutant(
        "a loss may read a vocabulary's weight later",
        "VocabRule.layout",
        "shard=plan.shards[name])",
        "shard=plan.shards[name], free=True)",
        "tests/test_vocabulary.py",
    ),
    Mutant(
        "a vocabulary that must stay whole is sharded when the proof is remembered",
        "Prover._prove",
        "Proof(plan, self._whole, ",
        'Proof(plan, "", ',
        "tests/test_vocabulary.py",
    ),
    Mutant(
        "an embedding that looks its rows up by itself is sharded",
        "unfit_forward",
        "if forward is not None and not",
        "if forward is not None and False and not",
        "tests/test_vocabulary.py tests/test_found_vocabulary.py",
    ),
    Mutant(
        "a vocabulary sharded by its name, with no proof",
        "_Search.found",
        "if one.is_certain or not certain]",
        "]",
        "tests/test_found_vocabulary.py",
    ),
    Mutant(
        "a user's rule for one of two tied ends forgets the other",
        "_deciding_rule",
        "            return rule.style\n        if rule.undoes_inside and inside(name, match.name):\n            return rule.style\n",
        "            return None\n",
        "tests/test_found_vocabulary.py",
    ),
    Mutant(
        "half of a tied gradient lost",
        "VocabParallelEmbedding.forward",
        "        out = F.embedding(local, _read(self.weight)) * mine",
        "        out = F.embedding(local, self.weight.detach()) * mine",
        "tests/test_logits.py tests/test_styles.py",
    ),
    Mutant(
        "a tied weight untied where it gets its numbers",
        "LateWeights.fill_parameters",
        "                torch.utils.swap_tensors(parameter, room)\n",
        "                setattr(place.holder, place.leaf, room)\n",
        "tests/test_meta_models.py",
    ),
    Mutant(
        "gather before the head missing",
        "DataPath.leave",
        "        return gather_replicated_from_sequence_parallel_region(x, self.dim, self.group, length)",
        "        return x",
    ),
    Mutant(
        "order of the summed gradients from a set",
        "GradSync.__init__",
        "for name in layout if layout[name].is_partial]\n        self.attach()",
        "for name in set(layout) if layout[name].is_partial]\n        self.attach()",
    ),
    Mutant(
        "a block that reads the length of its shard not seen",
        "StackPlanner._plan_rest",
        "        whole = bool(why_no_sp) or any(plan.reads_length for plan in known)\n",
        "        whole = dim is None\n",
        "tests/test_products.py",
    ),
    Mutant(
        "hidden states given away in parts",
        "_Swap._hook_modules_around",
        "            yield module.register_forward_hook(return_whole(around[id(module)]))\n",
        "            yield from ()\n",
        "tests/test_hf_uses.py",
    ),
    Mutant(
        "attention maps of some heads taken for all",
        "Observers.heads_made",
        "            self.sharded_outputs.note(out, module, 1, heads)\n",
        "            pass\n",
        "tests/test_hf_uses.py",
    ),
    Mutant(
        "router scores of a shard taken for all",
        "_Swap._hook_shard_readers",
        "                yield module.register_forward_hook(note_shards(region, name))\n",
        "",
        "tests/test_hf_uses.py",
    ),
    Mutant(
        "late weights drawn in another type",
        "deferred:_run",
        "    with default_dtype(op.dtype):\n",
        "    with default_dtype(None):\n",
        "tests/test_late_weights.py",
    ),
    Mutant(
        "draws of weights that are overwritten left out",
        "DeferredInit.replay",
        "                        if op.is_random:\n",
        "                        if op.is_random and not at:\n",
        "tests/test_late_weights.py",
    ),
    Mutant(
        "a seed set while a late model is made forgotten",
        "DeferredInit._note_stream",
        "            op.state = len(self._states)\n",
        "            op.state = len(self._states) if not self._states else -1\n",
        "tests/test_late_weights.py",
    ),
    Mutant(
        "each rank draws late weights from its own seed",
        "SeqParallelStrategy._late_weights",
        "        dist.broadcast_object_list(shared, src=dist.get_process_group_ranks(self._world)[0], group=self._world)\n",
        "",
        "tests/test_meta_models.py",
    ),
    Mutant(
        "the second half of a row's adapter summed where it is whole",
        "ResolvedPlan.layout_of",
        "        if self._follows_row(module):\n",
        "        if self._follows_row(module) and sp:\n",
        "tests/test_adapters.py",
    ),
    Mutant(
        "a variant of an adapter taken for the plain one",
        "is_adapted",
        "    return filled and not any(True for other in children.values() for _ in other.parameters())\n",
        "    return filled\n",
        "tests/test_adapters.py",
    ),
    Mutant(
        "fused parts written out of order",
        "Part.__init__",
        "        for start, stop in shard.ranges[rank]:\n            if stop > start:\n                rows",
        "        for start, stop in reversed(shard.ranges[rank]):\n            if stop > start:\n                rows",
        "tests/test_folder.py -k round_trips",
    ),
    Mutant(
        "random streams begin anew",
        "SavingStrategy.load_optimizer_state_dict",
        "            unpack_streams(self._streams, self.root_device)\n        if not",
        "            pass\n        if not",
        "tests/test_folder.py -k resumed",
    ),
    Mutant(
        "the order of samples follows the stream",
        "ReplicaSampler.set_epoch",
        "            torch.default_generator.manual_seed(number)\n",
        "",
        "tests/test_folder.py -k resumed",
    ),
    Mutant(
        "a failure to write kept to the first rank",
        "on_first_rank",
        "    if message[0] is not None:\n        raise SaveError",
        "    if message[0] is not None and dist.get_rank(group) == 0:\n        raise SaveError",
        "tests/test_files.py -k failure",
    ),
    Mutant(
        "a file written in its own place",
        "WholeFileIO.save_checkpoint",
        "        write_synced(beside(place, UNFINISHED), lambda file: torch.save(checkpoint, file))\n"
        "        beside(place, UNFINISHED).replace(place)\n",
        "        write_synced(place, lambda file: torch.save(checkpoint, file))\n",
        "tests/test_files.py -k failure",
    ),
    Mutant(
        "a truncated folder is read",
        "Folder.__init__",
        "        self._check_files()\n",
        "",
        "tests/test_folder.py -k damaged",
    ),
    Mutant(
        "16-bit sums counted at their own size",
        "step_traffic",
        "count * max(4, parameter.element_size())",
        "count * 2",
        "tests/test_estimates.py",
    ),
    Mutant(
        "the marker written first",
        "begin_folder",
        "    unfinished.mkdir(parents=True)\n",
        '    unfinished.mkdir(parents=True)\n    (unfinished / MARKER).write_text(json.dumps({"format": FORMAT}))\n',
        "tests/test_crash.py",
    ),
    Mutant(
        "moments of a replicated parameter from the wrong rank",
        "_assemble",
        '        return local if _is_writer(groups) else local.to("meta")\n',
        '        return local.to("meta") if _is_writer(groups) else local\n',
        "tests/test_checkpoint.py",
    ),
    Mutant(
        "what all ranks hold written by none of some",
        "_WriterChoice.part",
        "writes=writer == (dp, tp)",
        "writes=writer == (dp, 0)",
        "tests/test_any_to_any.py",
    ),
    Mutant(
        "padding left in",
        "Shard.assemble",
        "        shape[self.dim] = self.length\n        whole = parts[0].new_empty(shape)\n",
        "        if self.padded is not None:\n            return torch.cat(list(parts), self.dim)\n"
        "        shape[self.dim] = self.length\n        whole = parts[0].new_empty(shape)\n",
        "tests/test_folder.py -k round_trips",
    ),
    Mutant(
        "padding left in the parts",
        "Part.__init__",
        "        self.shape = torch.Size(local.shape if layout is None or shard is None else layout.global_shape)\n",
        "        self.shape = torch.Size(local.shape if layout is None or shard is None else layout.global_shape)\n"
        "        if shard is not None and shard.padded is not None:\n"
        "            self.shape = torch.Size([shard.padded * len(shard.ranges), *self.shape[1:]])\n",
        "tests/test_folder.py -k round_trips",
    ),
    Mutant(
        "the writing dealt to one replica",
        "_WriterChoice.part",
        "        self._loads[row] += math.prod(layout.global_shape) * value.element_size() / self._loads.shape[1]\n",
        "",
        "tests/test_saving_memory.py -k share",
    ),
    Mutant(
        "what is written at once is copied first",
        "write_folder",
        "        return lambda: _write(path, parts, packed, facts, group)",
        "        return lambda: _write(path, {key: part.frozen() for key, part in parts.items()}, packed, facts, group)",
        "tests/test_saving_memory.py -k holds_more",
    ),
    Mutant(
        "what is written meanwhile is no copy",
        "Part.frozen",
        'offsets: (piece.to("cpu", copy=True), True)',
        "offsets: (piece, True)",
        "tests/test_async.py",
    ),
    Mutant(
        "an older checkpoint goes before the new one is whole",
        "Background.afterwards",
        "        if saving is None or self._thread is None:\n",
        "        if True:\n",
        "tests/test_async.py",
    ),
    Mutant(
        "a name that is being written is free",
        "SavingStrategy.on_train_start",
        "                self._reserve_names(callback)\n",
        "                pass\n",
        "tests/test_async.py",
    ),
    Mutant(
        "training ends before its last checkpoint is written",
        "SavingStrategy.on_train_end",
        "        self._trains = False\n        self._background.wait()\n",
        "        self._trains = False\n",
        "tests/test_async.py",
    ),
    Mutant(
        "what one rank can't read the others go on with",
        "on_every_rank",
        "        if error_of_rank is not None:\n            raise ValueError",
        "        if error_of_rank is not None and rank < 0:\n            raise ValueError",
        "tests/test_files.py -k one_rank",
    ),
    Mutant(
        "moments live in the file that was read",
        "load_full_optimizer_state",
        "own_memory(value) if value is flat[index, key] else value",
        "value",
        "tests/test_files.py -k lives",
    ),
    Mutant(
        "loaders shuffled alike",
        "OrderSeed.of_epoch",
        "1_000_003 * place",
        "0 * place",
        "tests/test_data.py -k two_shuffled",
    ),
    Mutant(
        "an order that is agreed on behind the first read",
        "inject_sampler",
        "        sampler.set_epoch(epoch)\n",
        "        pass\n",
        "tests/test_data.py -k before",
    ),
    Mutant(
        "buffers of several replicas in one folder",
        "model_parts",
        "alike=isinstance(value, nn.Parameter)",
        "alike=True",
        "tests/test_folder.py -k buffers",
    ),
    Mutant(
        "weights that differ written as tied ones",
        "HuggingFaceTarget._without_ties",
        "if identity(written) != identity(left_out) and not torch.equal(",
        "if identity(written) != identity(left_out) and torch.equal(",
        "tests/test_huggingface.py -k apart",
    ),
    Mutant(
        "experts left stacked",
        "HuggingFaceTarget._grouped",
        "        if not mapping:\n",
        "        if mapping:\n            self._model._weight_conversions = None\n        if True:\n",
        "tests/test_huggingface.py",
    ),
    Mutant(
        "tensors under the model's prefix that it has not are dropped",
        "HuggingFaceTarget._check",
        "        if self._start and (more := ",
        "        if False and (more := ",
        "tests/test_huggingface.py -k this_model",
    ),
    Mutant(
        "all of a shard is held while it is written",
        "_scratch",
        "    store = torch.from_file(str(path), shared=True, size=max(size, 1), dtype=torch.uint8)\n",
        "    path.touch()\n    store = torch.zeros(max(size, 1), dtype=torch.uint8)\n",
        "tests/test_huggingface.py -k held",
    ),
    Mutant(
        "a property that a plan set not taken back",
        "unshard",
        "    for restore in reversed(record.restore):  # what was changed last is taken back first\n        restore()\n",
        "",
        "tests/test_parallelize.py -k property",
    ),
    Mutant(
        "attributes that a plan changed not taken back",
        "ModuleChange.undo",
        "        own.update(self.replaced)\n",
        "",
        "tests/test_parallelize.py",
    ),
    Mutant(
        "an error in the measured batch leaves the counters on",
        "StepMeter.on_exception",
        "        self._stop()\n",
        "        pass\n",
        "tests/test_step_meter.py",
    ),
    Mutant(
        "figures of a batch that never came are zeros",
        "StepMeter._read",
        "        raise RuntimeError(\n",
        "        return _StepFigures(0, {}, {}, {}, {})\n        raise RuntimeError(\n",
        "tests/test_step_meter.py",
    ),
    Mutant(
        "a command line without its extra goes on",
        "main:_run",
        "    if not has_cli():\n",
        "    if False:\n",
        "tests/test_cli.py -k extra",
    ),
    Mutant(
        "a trace without losses is compared",
        "parity:compare",
        "    if bool(reference.losses) != bool(candidate.losses):\n",
        "    if False:\n",
        "tests/test_parity.py -k without_losses",
    ),
    # ---- steps that use their trainer ----
    Mutant(
        "a step before training writes to the user's own objects",
        "LazyCopies._copy",
        "        if isinstance(value, dict | list",
        "        if isinstance(value, list):\n            return value\n        if isinstance(value, dict | list",
        "tests/test_trainer_view.py",
    ),
    Mutant(
        "a step before training grows a list of the user's class",
        "own_containers",
        "module.__dict__.setdefault(name, copy.copy(value))",
        "pass",
        "tests/test_trainer_view.py",
    ),
    Mutant(
        "a step before training logs",
        "_view.changes",
        'return {**dict.fromkeys(names, _nothing), "experiment": experiment}',
        "return {}",
        "tests/test_trainer_view.py",
    ),
    Mutant(
        "what replicas gather is one entry before training",
        "_of_strategy.all_gather",
        "torch.stack([tensor] * size)",
        "tensor.unsqueeze(0)",
        "tests/test_trainer_view.py -k entry",
    ),
    Mutant(
        "gathered entries have no gradient",
        "TopologyStrategy.all_gather",
        "with nullcontext() if sync_grads else torch.no_grad():",
        "with torch.no_grad():",
        "tests/test_trainer_in_steps.py",
    ),
    Mutant(
        "entries are gathered over the world",
        "TopologyStrategy.all_gather",
        'over = self.groups["dp"] if',
        "over = self._world if",
        "tests/test_trainer_in_steps.py",
    ),
    Mutant(
        "an example waits for ranks that are not there",
        "OneRankOnly.__torch_dispatch__",
        'if func.namespace in ("c10d", "_c10d_functional"):',
        "if False:",
        "tests/test_trainer_view.py",
    ),
    # ---- kinds of code that libraries have ----
    Mutant(
        "the gradient of a scale of all heads is not summed",
        "GradientRule.layout",
        "partial=self.summed",
        "partial=False",
        "tests/test_third_party.py -k tp2-shared_scale",
    ),
    Mutant(
        "the gradient of a norm behind the row is summed",
        "BlockPlanner._write_gradients",
        "elif inner and flow.behind_rows(parameter):",
        "elif False:",
        "tests/test_kinds_of_code.py -k rules",
    ),
    Mutant(
        "batch norms behind columns are not known to be cut with them",
        "edit_search:_batch_norms",
        'if block.flow.between(f"{name}.weight", [group.row])',
        "if False",
        "tests/test_kinds_of_code.py -k batch_normed",
    ),
    Mutant(
        "a parametrized weight is not seen as one",
        "_BlockReader._parametrized",
        "if not any(",
        "if any(",
        "tests/test_kinds_of_code.py -k parametrized",
    ),
    Mutant(
        "a model of convolutions is asked to name its blocks",
        "only_convolutions",
        "if not sizes:",
        "if True:",
        "tests/test_kinds_of_code.py -k convolutions",
    ),
    Mutant(
        "a linear over positions hides the columns in front of it",
        "group_layout",
        "if support.mixes(name) and",
        "if False and",
        "tests/test_kinds_of_code.py -k rules",
    ),
    Mutant(
        "a list of modules taken for a module that is called",
        "part_around",
        "and not trace.calls_of(around)",
        "and False",
        "tests/test_kinds_of_code.py -k rules",
    ),
    Mutant(
        "what one stack's code raises ends inference for the others",
        "infer:_infer",
        'if "use_reentrant" in str(caught):',
        "if not isinstance(caught, CantInferError):",
        "tests/test_kinds_of_code.py -k error",
    ),
    Mutant(
        "a scaled linear taken for a linear",
        "_makes",
        "torch.allclose(got, wanted, rtol=1e-4, atol=1e-5)",
        "True",
        "tests/test_kinds_of_code.py -k linear",
    ),
    Mutant(
        "a linear whose noise may grow taken for a linear",
        "linear_kind",
        "if isinstance(module, nn.Linear) and _reads_more(module):",
        "if False:",
        "tests/test_kinds_of_code.py -k linear",
    ),
    Mutant(
        "a linear is probed as it stands, not in training",
        "linear_kind:_try",
        "for training in (True, False)",
        "for training in (module.training,)",
        "tests/test_kinds_of_code.py -k linear",
    ),
    Mutant(
        "a linear that casts its weight taken for one that does not",
        "linear_kind:_try",
        "return None if _output(module, x.to(other), module.training) is not None else kind",
        "return kind",
        "tests/test_kinds_of_code.py -k linear",
    ),
    *(
        Mutant(name, definition, old, new, f"tests/{tests}")
        for name, definition, old, new, tests in (
            (
                "a second activation taken for a memory",
                "find_streams",
                "found.append(key)",
                "pass",
                "test_kinds_of_code.py -k rules",
            ),
            (
                "rows that share columns are planned one by one",
                "BlockPlanner._rows_beside",
                "return found[1:]",
                "return []",
                "test_kinds_of_code.py -k rules",
            ),
            (
                "a column that nothing reads has its row refused",
                "_FeatureSupport.deal",
                "if not covered.any():",
                "if False:",
                "test_kinds_of_code.py -k rules",
            ),
            (
                "a fused parameter cut in one piece",
                "LocalHeadsRule.check",
                "Shard.by_segments(self.dim % tensor.ndim, segments, units, plan.size, name)",
                "Shard.by_segments(self.dim % tensor.ndim, [length], [length], plan.size, name)",
                "test_third_party.py -k tp2-weight_of_qkv",
            ),
            (
                "ranks that share a head of a parameter do not sum its gradient",
                "LocalHeadsRule.layout",
                "partial=shard.has_shared",
                "partial=False",
                "test_third_party.py -k tp4-grouped_adapters",
            ),
            (
                "an input made inside a module is gathered nowhere",
                "GatherPoints._gather_sources",
                "return True",
                "return False",
                "test_kinds_of_code.py -k rules",
            ),
            (
                "one kind of block that can't be planned ends the search",
                "StackPlanner.plan",
                "if not failing or not rest:",
                "if True:",
                "test_kinds_of_code.py -k rules",
            ),
            (
                "a pattern of some blocks of a list matches all of them",
                "block_planner:pattern_of",
                " and {*leaves} == {*model.get_submodule(parent)._modules}",
                "",
                "test_kinds_of_code.py -k rules",
            ),
            (
                "a product with a weight reads the stand-in",
                "stand_in:_PRODUCTS",
                "(F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)",
                "()",
                "test_kinds_of_code.py -k rules",
            ),
            (
                "a row's joined input taken for one part",
                "_BlockReader._segments_of",
                "return sizes if sum(sizes) == self.value(number).shape[-1] else ()",
                "return ()",
                "test_kinds_of_code.py -k rules",
            ),
            (
                "a row's joined input dealt out as one part",
                "RowRule.check",
                "        plan.shards[name] = Shard.by_segments(dim, segments, units, plan.size, name)",
                "        plan.shards[name] = Shard.by_segments(dim, [length], [length], plan.size, name)",
                "test_third_party.py -k tp2-one_way_out",
            ),
            (
                "what a projection reads in its second call is not copied",
                "GatherPoints.settle",
                "(flow.linears[column].reads, *flow.linears[column].also_reads)",
                "(flow.linears[column].reads,)",
                "test_kinds_of_code.py -k rules",
            ),
            (
                "the linear behind an attention's way out taken for the row",
                "_end_rows_at_attention",
                "if not upstream or ",
                "if True or ",
                "test_kinds_of_code.py -k rules",
            ),
            (
                "positions that a block is given taken for a weight",
                "_BlockReader._step",
                " and not self.upstream_of.get(n)]",
                "]",
                "test_kinds_of_code.py -k rules",
            ),
        )
    ),
    Mutant(
        "a head count divided in one of two modules",
        "_needed",
        "if rehearse(block, groups, tp, [*edits, *fewer]) is None:",
        "if True:",
        "tests/test_kinds_of_code.py -k rules",
    ),
    Mutant(
        "an adapter's second half keeps a part of its gradient",
        "ReduceRule.layout",
        "Reason.IN_SUM, partial=True",
        "Reason.IN_SUM, partial=False",
        "tests/test_third_party.py -k tp2-low_rank_row",
    ),
    Mutant(
        "a module with a nonlinearity is taken for a row",
        "summed_rows:_Candidate._sums_up",
        "if not float((total - whole).abs().max())",
        "if not 0.0 * float((total - whole).abs().max())",
        "tests/test_kinds_of_code.py -k sum_of_products",
    ),
    Mutant(
        "what saturates is tried in small numbers alone",
        "summed_rows:_Candidate._inputs",
        "noise * scale",
        "noise * 1e-3",
        "tests/test_kinds_of_code.py -k sum_of_products",
    ),
    Mutant(
        "a row that is linear in evaluation alone",
        "summed_rows:_Candidate._sums_up",
        "product((True, False), self._inputs())",
        "product((False,), self._inputs())",
        "tests/test_kinds_of_code.py -k sum_of_products",
    ),
    Mutant(
        "a row is scaled by what another module computes",
        "summed_rows:_is_closed",
        "return all(",
        "return True or all(",
        "tests/test_kinds_of_code.py -k sum_of_products",
    ),
    Mutant(
        "an adapter that drops out of its output is a row",
        "summed_rows:_Candidate._draws_for_features",
        "draw.shape != x.shape",
        "False",
        "tests/test_kinds_of_code.py -k sum_of_products",
    ),
    Mutant(
        "an adapter on a row drops the same features on every rank",
        "SequenceRegion.leave_partial",
        "if not of_features:",
        "if True:",
        "tests/test_third_party.py -k drops",
    ),
    Mutant(
        "a scale of a row's input is left whole",
        "summed_rows:_Candidate._ways",
        '["local"] if len(vector) == self._features else []',
        "[]",
        "tests/test_kinds_of_code.py -k rules",
    ),
    Mutant(
        "a depthwise convolution keeps the groups of all channels",
        "_depthwise",
        'for key in ("groups", "in_channels", "out_channels")',
        'for key in ("in_channels",)',
        "tests/test_kinds_of_code.py -k rules",
    ),
    Mutant(
        "channels cut in another order than the features",
        "LocalHeadsRule.apply",
        "shrink(tensor, shard, application.rank)",
        "shrink(tensor, shard, -1 - application.rank)",
        "tests/test_third_party.py -k mix_ffn",
    ),
    Mutant(
        "a batch norm sees a shard of the sequence",
        "Block.sequence_dim",
        "return None if all(mixed) else",
        "return 1 if all(mixed) else",
        "tests/test_kinds_of_code.py -k rules",
    ),
    Mutant(
        "a gradient that was copied inside is copied again around it",
        "GatherPoints.settle",
        "        if fed:\n",
        "        if False:\n",
        "tests/test_kinds_of_code.py -k rules",
    ),
    Mutant(
        "what a column reads beside the activation is not copied",
        "GatherPoints.settle",
        'self._write(point, "copy", [key for key in sources if call.args[key] not in made])',
        "pass",
        "tests/test_kinds_of_code.py -k rules",
    ),
    Mutant(
        "a stand-in for an argument that is copied",
        "BlockPlanner._write_gathers",
        'if style == "gather" and any(key in args for key in narrow):',
        "if narrow:",
        "tests/test_kinds_of_code.py -k rules",
    ),
    Mutant(
        "a weight that is read past its linear dealt out by its in-features",
        "_BlockReader._out_dim",
        "return turns % 2",
        "return 1 - turns % 2",
        "tests/test_kinds_of_code.py -k rules",
    ),
    Mutant(
        "a column's output may not be changed in place",
        "_product",
        "if out._is_view() else out",
        "if False else out",
        "tests/test_third_party.py -k in_place",
    ),
    Mutant(
        "what a shipped plan covers is inferred again",
        "infer:_infer",
        "if not any(inside(name, call.name) or inside(call.name, name) for call in calls for name in planned if name)",
        "if True",
        "tests/test_kinds_of_code.py -k shipped",
    ),
    Mutant(
        "behind a shipped plan nothing is inferred",
        "_resolve_base",
        "infer_rest(search.plans) if infer_rest and linears_beside(model, search.plans) else None",
        "None",
        "tests/test_kinds_of_code.py -k shipped",
    ),
    Mutant(
        "behind a shipped plan something is sharded that nothing proves",
        "Prover._infer_rest",
        "        if not self._config.self_check:\n",
        "        if False:\n",
        "tests/test_third_party.py -k without_a_proof",
    ),
    Mutant(
        "what is computed whole is not said",
        "Prover._tell_what_is_whole",
        "        if parts:\n",
        "        if False:\n",
        "tests/test_zoo.py -k said",
    ),
    # ---- refusals told by each rank, by none, or with all that lies inside ----
    Mutant(
        "every rank tells what all of them raised",
        "Refusals.tell_once",
        "        sys.excepthook = print_once\n",
        "",
        "tests/test_refusals.py",
    ),
    Mutant(
        "what rank 0 caught is told by nobody",
        "Refusals.tell_once",
        '(self._rank and not self._have_come([f"{self._name} is told"]))',
        "False",
        "tests/test_refusals.py",
    ),
    Mutant(
        "an error of one rank alone is taken for everybody's",
        "Refusals._have_come",
        "            return False\n",
        "            return True\n",
        "tests/test_refusals.py",
    ),
    Mutant(
        "ranks that raise different errors count as one refusal",
        "Refusals.is_shared",
        " and all(self._store.get(key).decode() == said for key in keys)",
        "",
        "tests/test_refusals.py",
    ),
    Mutant(
        "the watch over the children tells a refusal once more",
        "ChildWatch._at_exit",
        "uncaught is not None and uncaught is self._expected",
        "False",
        "tests/test_launch.py -k refusal_is_told_once",
    ),
    Mutant(
        "a refusal is shown with all frames inside the package",
        "without_inner_frames",
        "    frames[inner].tb_next = None\n",
        "",
        "tests/test_bad_input.py -k traceback",
    ),
    Mutant(
        "a rule is proposed that was not tried",
        "with_tried_rules",
        "            attempt(rules)\n",
        "            pass\n",
        "tests/test_infer.py -k proposes",
    ),
    Mutant(
        "rules that are proposed together were tried one by one",
        "with_tried_rules",
        "attempt(rules)",
        "attempt(stopped.rules)",
        "tests/test_infer.py -k tried_together",
    ),
    Mutant(
        "a plan that was wrong in all that was tried is called right",
        "Prover._is_right",
        "return False",
        "return True",
        "tests/test_selfcheck.py -k refused_plan_is_not",
    ),
    Mutant(
        "the trainer of another package is not told what to import",
        "SeqParallelStrategy.__repr__",
        "{_OTHER_PACKAGE * ('pytorch_lightning' in sys.modules)}",
        "",
        "tests/test_config.py -k other_package",
    ),
    # ---- what is sharded of what could be ----
    *(
        Mutant(f"coverage: {name}", definition, old, new, f"tests/{tests}")
        for name, definition, old, new, tests in (
            (
                "whole sequences everywhere are listed as sequence parallelism",
                "switches",
                " and (coverage is None or coverage.sp)",
                "",
                "test_summary.py",
            ),
            (
                "blocks without sequence parallelism are not named beside those with it",
                "switches",
                "f\"sequence parallelism{f'; not in {sp_off}' if sp_off else ''}\"",
                '"sequence parallelism"',
                "test_summary.py",
            ),
            (
                "no warning of sequence parallelism that is off",
                "Coverage.warnings",
                "*self._warn_of_sp(), ",
                "",
                "test_coverage.py",
            ),
            (
                "no warning of little that is sharded",
                "Coverage.warnings",
                ", *self._warn_of_little()",
                "",
                "test_coverage.py",
            ),
            (
                "the user is warned of what he asked for",
                "Coverage._warn_of_little",
                " if not one.as_asked]",
                "]",
                "test_coverage.py",
            ),
            (
                "norms and embeddings could be sharded",
                "_Look._is_matrix",
                " or isinstance(self._modules[holder], _NO_LINEARS)",
                "",
                "test_coverage.py",
            ),
            (
                "both halves of an adapter could be sharded",
                "_Look._is_matrix",
                "not any(is_adapted",
                "not any(False and is_adapted",
                "test_coverage.py",
            ),
            (
                "a stack without a plan could not be sharded",
                "_Look.__init__",
                "self._blocks |= set(_repeated(record.model)) - owners",
                "pass",
                "test_coverage.py",
            ),
            (
                "a whole vocabulary is not counted",
                "_Look.could_be",
                "if self._vocabulary(name) is not None:",
                "if False:",
                "test_coverage.py",
            ),
            (
                "a part of a block that is whole passes for the block",
                "_Look.patterns",
                " and around not in taken",
                "",
                "test_coverage.py",
            ),
            (
                "the reasons are not remembered with a proof",
                "Prover._proved",
                "self._known = Explanations(remembered.why_whole, remembered.no_sp, remembered.rest)",
                "pass",
                "test_selfcheck.py -k says_what_the_first",
            ),
            (
                "why a plan is as it is is not remembered with a proof",
                "Prover._proved",
                "self._reasons, self._frozen = remembered.reasons, remembered.frozen",
                "self._frozen = remembered.frozen",
                "test_selfcheck.py -k says_what_the_first",
            ),
            (
                "what the self-check found on shards is not the reason",
                "Prover._check_or_widen",
                "self._why_wide = _cause(error)",
                "pass",
                "test_selfcheck.py -k says_what_the_first",
            ),
        )
    ),
    # ---- what users of Lightning are used to ----
    *(
        Mutant(f"habits: {name}", definition, old, new, f"tests/test_{tests}")
        for name, definition, old, new, tests in (
            (
                "a clock of one rank is not everybody's",
                "SteppingStrategy._agree_on_time",
                "all=False",
                "all=True",
                "trainer_manners.py::test_the_rest_of_a_run",
            ),
            (
                "frozen parameters are not proved",
                "detached_copy",
                "    if not frozen:\n",
                "    if False:\n",
                "trainer_manners.py::test_the_rest_of_a_run",
            ),
            (
                "what was proved frozen may thaw",
                "ShardedModel.check_frozen",
                "sorted(self.stay_frozen)",
                "()",
                "trainer_manners.py::test_the_rest_of_a_run",
            ),
            (
                "no copy with what is frozen left so",
                "ExampleSearch._ways",
                "for frozen in (False, True) if",
                "for frozen in (False,) if",
                "trainer_manners.py::test_the_rest_of_a_run",
            ),
            (
                "a step reads parts of gradients on the copy",
                "observe_run",
                "            sync.flush_all()\n",
                "            pass\n",
                "trainer_manners.py -k 2-2",
            ),
            (
                "a backward within a step is recorded with its forward",
                "ForwardTrace.run_backward",
                "self._is_paused = True",
                "pass",
                "trainer_manners.py -k 2-2",
            ),
            (
                "a step reads no gradients on the copy",
                "ExampleSearch._ways",
                "for reads_gradients in (False, True) if",
                "for reads_gradients in (False,) if",
                "trainer_manners.py -k 2-2",
            ),
            (
                "schedulers of the class, not of the instance",
                "_Steps._configured",
                "self._model.configure_optimizers()",
                "type(self._model).configure_optimizers(self._model)",
                "trainer_manners.py -k 2-2",
            ),
            (
                "updates before a rate is found pass for others",
                "SteppingStrategy.training_step",
                "record.versions.clear()",
                "pass",
                "trainer_manners.py -k 2-2",
            ),
            (
                "a batch before its transfer",
                "_of_loaders",
                "batch = module._on_before_batch_transfer(batch, dataloader_idx=0)",
                "pass",
                "trainer_manners.py -k 2-2",
            ),
            (
                "an iterator taken for a batch",
                "_of_loaders",
                "iterates=one in iterating",
                "iterates=False",
                "trainer_manners.py -k 2-2",
            ),
            (
                "evaluation loaders read at once",
                "_peek",
                "if in_turn and",
                "if False and",
                "trainer_manners.py::test_the_rest_of_a_run",
            ),
            (
                "steps are not told of several loaders",
                "_step_args",
                "((0,) if several else ())",
                "()",
                "before_set_up.py",
            ),
            (
                "an example leaves counts",
                "_contents_kept",
                "own.update(before)",
                "pass",
                "trainer_manners.py::test_the_rest_of_a_run",
            ),
            (
                "an example leaves items in lists",
                "_contents_kept",
                "value[:] = items",
                "pass",
                "trainer_manners.py::test_the_rest_of_a_run",
            ),
            (
                "an MLP in front taken for a block",
                "find_stacks",
                "outermost = _without_lone_mlps(trace, outermost, model)",
                "pass",
                "trainer_manners.py::test_the_rest_of_a_run",
            ),
            (
                "shards are pickled",
                "guard_pickling",
                "PickleGuard()",
                "None",
                "trainer_manners.py::test_the_rest_of_a_run",
            ),
            (
                "a copied metric syncs over the world",
                "_Copyable.__deepcopy__",
                "memo[id(self.process_group)] = self.process_group",
                "memo[id(self.process_group)] = None",
                "trainer_manners.py::test_the_rest_of_a_run",
            ),
            (
                "a pickled trainer has this run's groups",
                "ParallelGroups.__getstate__",
                '"_fake": True, "_groups": {}, "_twins": {}, "_made": []',
                "",
                "trainer_manners.py::test_what_tp_1_runs_too",
            ),
            (
                "emptied optimizer states are another model's",
                "SavingStrategy._load_optimizers",
                "if not states:",
                "if False:",
                "trainer_manners.py::test_the_rest_of_a_run",
            ),
            (
                "every layout of a state dict is torch's",
                "_is_torchs_layout",
                "return isinstance(entries, Mapping) and all(",
                "return True or all(",
                "trainer_manners.py::test_what_tp_1_runs_too",
            ),
            (
                "tensors of a layout of its own stay unread",
                "read_whole",
                "opened.take(meta, {}, rank)",
                "{}",
                "trainer_manners.py::test_what_tp_1_runs_too",
            ),
            (
                "a layout of its own is cut",
                "_refuse_own_layout",
                "if layout is not None and state:",
                "if False:",
                "before_set_up.py",
            ),
            (
                "batches before set-up are counted over the ranks",
                "TopologyStrategy.distributed_sampler_kwargs",
                'topology.get_dim("dp")',
                "topology.world_size",
                "before_set_up.py",
            ),
            (
                "a missing checkpoint is no missing file",
                "NoCheckpointError",
                "class NoCheckpointError(FileNotFoundError, ValueError):",
                "class NoCheckpointError(ValueError):",
                "before_set_up.py",
            ),
            (
                "an exception stays ours",
                "SeqParallelStrategy.on_exception",
                "super().on_exception(exception)",
                "pass",
                "before_set_up.py",
            ),
        )
    ),
    # ---- a remembered proof used for another model ----
    *(
        Mutant(f"a remembered proof used for another model: {name}", definition, old, new, "tests/test_proof_cache.py")
        for name, definition, old, new in (
            ("a closure's cell", "ContentDigest._function", "parts.append((cell.cell_contents,", "parts.append((None,"),
            ("code nested in code", "ContentDigest._read", "[(constant, path) for constant in value.co_consts]", "[]"),
            ("defaults", "ContentDigest._function", "(value.__defaults__, path)", "(None, path)"),
            ("keyword defaults", "ContentDigest._function", "(value.__kwdefaults__, path)", "(None, path)"),
            ("the body", "ContentDigest._read", "*(repr(getattr(value, name)) for name in _CODE)", "value.co_name"),
            ("the bound self", "ContentDigest._code", "(value.__self__, path)]", "(None, path)]"),
            ("a global", "ContentDigest._function", "sorted(names & space.keys())", "()"),
            (
                "an attribute",
                "ContentDigest._attributes",
                "parts += [(key, path), (item, ",
                "parts += [(key, path), (None, ",
            ),
            ("a slot", "ContentDigest._attributes", "(slot.__get__(value), ", "(None, "),
            ("a user's class", "ContentDigest._class", "for key, item in vars(value).items():", "for key, item in ():"),
            ("a hook", "hooks_of", "if hooks}", "if not hooks}"),
            ("a buffer", "_add_modules", "digest.add(content_of(buffer), path)", "pass"),
            ("ties", "_add_modules", "[key, first, ", "[key, "),
            ("frozen weights", "_add_modules", "parameter.requires_grad, ", ""),
            ("the library patched", "fingerprint", "            digest.add(patched, where)\n", ""),
            ("the topology", "fingerprint", '"sizes": dict(sizes),', '"sizes": {},'),
            ("the example", "fingerprint", '"example": _structure(example),', '"example": None,'),
            ("the data module", "_add_trainer", 'if "datamodule" in digest.names:', "if False:"),
            ("order of tokens", "ContentDigest._write", 'b"%d:" % len(raw) + raw', "raw"),
            ("a file that was changed", "read_proof", "proof if seal == _seal(key, proof) else None", "proof"),
        )
    ),
    Mutant(
        "fsdp: split over the world",
        "FullySharded.__init__",
        'DeviceMesh.from_group(record.groups["dp"]',
        'DeviceMesh.from_group(record.groups["dp", "tp"]',
        "tests/test_fsdp.py::test_parity_with_one_process",
    ),
    Mutant(
        "fsdp: reduction in every micro-batch",
        "SteppingStrategy.block_backward_sync",
        "        self._split.reduce_next(False)\n",
        "",
        "tests/test_fsdp.py::test_what_it_sends_and_what_it_refuses",
    ),
    Mutant(
        "fsdp: norm from this rank's rows",
        "global_grad_norm",
        '        dist.all_reduce(both, op=op, group=groups["dp"])\n',
        "",
        "tests/test_fsdp.py::test_parity_with_one_process",
    ),
    Mutant(
        "fsdp: a product behind its block's reduction",
        "DataPath.enter",
        'if self.row_window != "any":',
        "if False:",
        "tests/test_fsdp.py::test_parity_with_one_process",
    ),
    Mutant(
        "fsdp: what the reduction left behind unseen",
        "FullySharded.check_reduced",
        "if left := self._record.layout.left_computing():",
        "if left := []:",
        "tests/test_fsdp.py::test_what_it_sends_and_what_it_refuses",
    ),
    Mutant(
        "fsdp: gradient sync on the parameters before",
        "FullySharded.__init__",
        "        record.layout.rebind(self._model)\n",
        "",
        "tests/test_fsdp.py::test_parity_with_one_process",
    ),
    Mutant(
        "fsdp: a summed gradient summed again",
        "GradSync.begin_backward",
        "local_rows(grad).div_(self._share(partial, grad))",
        "pass",
        "tests/test_fsdp.py::test_parity_with_one_process",
    ),
    Mutant(
        "fsdp: no reduction of a backward within a step",
        "FullySharded.expect_backward",
        "if loss.requires_grad:",
        "if False:",
        "tests/test_fsdp.py::test_parity_with_one_process",
    ),
    Mutant(
        "fsdp: a parameter without dims not averaged",
        "FullySharded.average",
        "if not due:",
        "if True:",
        "tests/test_fsdp.py::test_parity_with_one_process",
    ),
    Mutant(
        "fsdp: shared heads summed by the first replica's rows",
        "_SharedPart.__init__",
        "            at = at[slice(*rows)]\n",
        "            at = at[: rows[1] - rows[0]]\n",
        "tests/test_fsdp.py::test_parity_with_one_process",
    ),
    Mutant(
        "fsdp: shared heads counted by the first replica's rows",
        "global_grad_norm",
        "is_first = is_first[slice(*rows)]",
        "is_first = is_first[: rows[1] - rows[0]]",
        "tests/test_fsdp.py::test_parity_with_one_process",
    ),
    Mutant(
        "fsdp: rows written at another replica's place",
        "Part.__init__",
        "                    offsets[0] = rows[0]\n                    offsets[shard.dim] = start + low - at\n",
        "                    offsets[0] = 0\n                    offsets[shard.dim] = start + low - at\n",
        "tests/test_any_to_any.py::test_any_to_any",
    ),
    Mutant(
        "fsdp: another replica's rows taken",
        "take_rows",
        "part[start:stop].clone()",
        "part[: stop - start].clone()",
        "tests/test_any_to_any.py::test_any_to_any",
    ),
    Mutant(
        "fsdp: freezing of a gathered parameter lost",
        "FullySharded._gather_outside",
        "own.requires_grad_(trains)\n                parameter.requires_grad_(trains)",
        "pass",
        "tests/test_fsdp.py::test_parity_with_one_process",
    ),
    Mutant(
        "fsdp: rows in a loss",
        "refuse_rows",
        "if any(is_split(tensor) for tensor in tree_leaves(out)):",
        "if False:",
        "tests/test_fsdp.py::test_what_it_sends_and_what_it_refuses",
    ),
    Mutant(
        "fsdp: a backward differentiated through freed parameters",
        "_refuse_graph",
        "if torch.is_grad_enabled():\n            raise",
        "if False:\n            raise",
        "tests/test_fsdp.py::test_what_it_sends_and_what_it_refuses",
    ),
    Mutant(
        "fsdp: replicas reduce what each has used",
        "FullySharded.__init__",
        "self.root.set_reduce_scatter_unused_params(True)",
        "self.root.set_reduce_scatter_unused_params(False)",
        "tests/test_fsdp.py::test_parity_with_one_process",
    ),
    Mutant(
        "fsdp: zeros for what nobody used",
        "FullySharded.drop_unused",
        "                layout.parameter(name).grad = None\n",
        "                pass\n",
        "tests/test_fsdp.py::test_parity_with_one_process",
    ),
    Mutant(
        "fsdp: uses forgotten between micro-batches",
        "FullySharded.expect_backward",
        "self._waiting = not self._reduces",
        "self._waiting = False",
        "tests/test_fsdp.py::test_parity_with_one_process",
    ),
    Mutant(
        "fsdp: an optimizer keeps the old parameters",
        "FullySharded.adopt",
        'group["params"][at] = self._record.layout.parameter(name)',
        "pass",
        "tests/test_fsdp.py::test_parity_with_one_process",
    ),
    Mutant(
        "fsdp: an old parameter changed unseen",
        "FullySharded.check_originals",
        "if self._own[name]._version != version:",
        "if False:",
        "tests/test_fsdp.py::test_what_it_sends_and_what_it_refuses",
    ),
    Mutant(
        "fsdp: an old parameter in the loss",
        "FullySharded.check_leaf",
        "is not None:",
        "is False:",
        "tests/test_fsdp.py::test_what_it_sends_and_what_it_refuses",
    ),
    Mutant(
        "overflows of a rank not shared",
        "SeqParallelStrategy.setup",
        '            share_overflows(self.precision_plugin, self.groups["dp", "tp"])\n',
        "            pass\n",
        "tests/test_precision.py::test_all_ranks_skip_the_same_step",
    ),
    Mutant(
        "overflows shared within a replica alone",
        "SeqParallelStrategy.setup",
        'share_overflows(self.precision_plugin, self.groups["dp", "tp"])',
        'share_overflows(self.precision_plugin, self.groups["tp"])',
        "tests/test_precision.py::test_all_ranks_skip_the_same_step",
    ),
    Mutant(
        "fused kernels on rows let through",
        "refuse_fused_on_rows",
        "if is_fused and",
        "if False and",
        "tests/test_optimizers.py",
    ),
    Mutant(
        "recompute: random streams not restored",
        "RecomputedForward.__call__",
        "use_reentrant=False)",
        "use_reentrant=False, preserve_rng_state=False)",
        "tests/test_random.py::test_what_was_dropped_is_dropped_again",
    ),
    Mutant(
        "recompute: a context that saves collectives",
        "RecomputedForward.__call__",
        "use_reentrant=False)",
        "use_reentrant=False, context_fn=lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(lambda ctx, op, *a, **k: "
        'torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE if op.namespace == "c10d" else '
        "torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE, allow_cache_entry_mutation=True))",
        "tests/test_recompute.py::test_a_recomputed_run_is_the_run",
    ),
    Mutant(
        "recompute: draws of Python and numpy made anew",
        "HostDraws.again",
        "        self._set(self._began)\n",
        "",
        "tests/test_random.py::test_what_was_dropped_is_dropped_again",
    ),
    Mutant(
        "recompute: the length of another call",
        "_Call.__init__",
        "            self._repeating = functools.partial(region.frames.repeating, region.frames.lengths())\n",
        "            pass\n",
        "tests/test_recompute.py::test_a_recomputed_run_is_the_run",
    ),
    Mutant(
        "recompute: what was gathered is kept whole",
        "_Kept.__init__",
        "region.columns.find_regathered(self.tensor) if region is not None else None",
        "None",
        "tests/test_formula.py::test_the_papers_layer",
    ),
    Mutant(
        "recompute: what was gathered has no gradient",
        "_Kept.restore",
        "kept = kept.detach().requires_grad_(self._requires_grad)",
        "kept = kept.detach()",
        "tests/test_recompute.py::test_a_recomputed_run_is_the_run",
    ),
    Mutant(
        "recompute: inside another checkpoint too",
        "RecomputedForward.__call__",
        "if in_backward() or is_of_checkpoint(hooks_in_force()):",
        "if False:",
        "tests/test_recompute.py::test_beside_the_models_own_checkpointing_it_steps_aside",
    ),
    Mutant(
        "recompute: without gradients too",
        "RecomputedForward.__call__",
        "if not torch.is_grad_enabled() or not saved_tensor_hooks_allowed():",
        "if False:",
        "tests/test_recomputed_forward.py::test_a_cache_is_not_filled_twice",
    ),
    Mutant(
        "recompute: nothing runs again",
        "recomputed",
        '    if recompute == "none":\n',
        "    if True:\n",
        "tests/test_recompute.py::test_modules_run_twice_while_they_train_and_are_given_back",
    ),
    Mutant(
        "recompute: without tp the modules are not given back",
        "SeqParallelStrategy.teardown",
        "            change.undo()\n",
        "            pass\n",
        "tests/test_recompute.py::test_modules_run_twice_while_they_train_and_are_given_back",
    ),
    Mutant(
        "recompute: a buffer is changed twice",
        "RecomputedForward._check_buffers",
        "if buffer._version != version:",
        "if False:",
        "tests/test_recomputed_forward.py::test_a_buffer_that_the_forward_changes_is_refused",
    ),
    Mutant(
        "recompute: a list is added to twice",
        "recompute:_sizes",
        "[len(value) for value in values if type(value) in (list, set, dict)]",
        "[]",
        "tests/test_recomputed_forward.py::test_a_list_that_the_forward_adds_to_is_refused",
    ),
    Mutant(
        "recompute: a cache is filled twice",
        "RecomputedForward._without_cache",
        'if length is None or not hasattr(value, "update")',
        'if True or not hasattr(value, "update")',
        "tests/test_recomputed_forward.py::test_a_cache_is_not_filled_twice",
    ),
    Mutant(
        "recompute: a checkpoint's gathers are made twice",
        "SavePolicy.remakes",
        " and not is_of_checkpoint(hooks_in_force())",
        "",
        "tests/test_recomputed_forward.py::test_under_a_checkpoint_auto_makes_nothing_a_second_time",
    ),
    Mutant(
        "recompute: what a selective checkpoint caches is not counted",
        "SavedBytes.keep_caches",
        "            self.keep(tensor)\n",
        "            pass\n",
        "tests/test_step_meter.py::test_what_a_selective_checkpoint_caches_counts",
    ),
    Mutant(
        "compiled: a row without its reduce-scatter",
        "LoweredRegion.reduce",
        "        return traced.reduce_scatter_to_sequence_parallel_region(x, self.dim, self.group, self.padding)",
        "        return traced.scatter_to_sequence_parallel_region(x, self.dim, self.group, self.padding)",
        "tests/test_compile.py -k one_process_does",
    ),
    Mutant(
        "compiled: the backward of f̄ sums once more",
        "traced:reduce_from_tensor_parallel_region",
        "return _Reduce.apply(x, group)",
        'return functional.all_reduce(x, "sum", group)',
        "tests/test_compile.py -k one_process_does",
    ),
    Mutant(
        "compiled: a copy whose gradient is not summed",
        "traced:_Copy.backward",
        "_sum(grad, ctx.group)",
        "grad",
        "tests/test_compile.py -k one_process_does",
    ),
    Mutant(
        "compiled: padding not trimmed behind a gather",
        "_trim",
        "x.shape[dim] - padding",
        "x.shape[dim]",
        "tests/test_compile.py -k one_process_does",
    ),
    Mutant(
        "compiled: the region's hooks in the graph",
        "_Swap._hooks",
        "(rule.lowered_before if lowered else rule.before)",
        "(rule.before)",
        "tests/test_compile.py -k one_process_does",
    ),
    Mutant(
        "compiled: steps whose draws are watched run eagerly",
        "BlockGraphs._as_compiled",
        "            stack.enter_context(unseen_by_compiler())\n",
        "",
        "tests/test_compile.py -k one_process_does",
    ),
    Mutant(
        "compiled: a recompute under another default dtype",
        "BlockGraphs._as_compiled",
        "            elif dtype != self._dtype:\n",
        "            elif False:\n",
        "tests/test_compile.py -k one_process_does",
    ),
    Mutant(
        "compiled: examples of a graph's draws make saved tensors",
        "graph_draws:_draws",
        "with torch.no_grad(), mode, draws:",
        "with mode, draws:",
        "tests/test_compile.py -k one_process_does",
    ),
    Mutant(
        "compiled: draws from the wrong stream",
        "GraphDraws.refusal",
        "            return str(wrong)\n",
        "            return None\n",
        "tests/test_compile.py -k lowered_form",
    ),
    Mutant(
        "compiled: a style without a lowered form let through",
        "refuse_unlowered",
        "        if (why := match.rule.unfit_to_lower(match.name, plan)) is not None:\n",
        "        if (why := match.rule.unfit_to_lower(match.name, plan)) is not None and False:\n",
        "tests/test_compile.py -k lowered_form",
    ),
    Mutant(
        "compiled: a graph of ours is no reader of its parameters",
        "check_readers",
        "*vocab.READERS)), *compiled}",
        "*vocab.READERS))}",
        "tests/test_compile.py -k one_process_does",
    ),
    Mutant(
        "compiled: without tp the blocks stay compiled",
        "SeqParallelStrategy.teardown",
        "            change.undo()\n",
        "            pass\n",
        "tests/test_compile.py -k without_tp",
    ),
    Mutant(
        "habits: an average of weights stays whole",
        "SeqParallelStrategy._share_out_averages",
        "                shard_average(average, record)\n",
        "",
        "tests/test_trainer_habits.py -k averages_of_weights",
    ),
    Mutant(
        "habits: an average of weights is saved in shards",
        "SeqParallelStrategy._share_out_averages",
        "                save_whole(average, functools.partial(self._average_state_dict, record))\n",
        "",
        "tests/test_trainer_habits.py -k averages_of_weights",
    ),
    Mutant(
        "habits: averages of weights start apart",
        "SeqParallelStrategy._share_out_averages",
        "            self._make_replicas_equal(average)\n",
        "",
        "tests/test_averages.py",
    ),
    Mutant(
        "habits: a second run averages copies of shards",
        "SeqParallelStrategy.setup_environment",
        "            unshard(self._module)\n",
        "            pass\n",
        "tests/test_averages.py -k twice",
    ),
    Mutant(
        "habits: an average of another model",
        "shard_average",
        "        if names != own:\n",
        "        if False:\n",
        "tests/test_averages.py -k another",
    ),
    Mutant(
        "habits: an average of no weights",
        "refuse_on_meta",
        "    if any(parameter.is_meta for parameter in model.parameters()):\n",
        "    if False:\n",
        "tests/test_averages.py -k weights",
    ),
    Mutant(
        "habits: an average in a folder stays unread",
        "SavingStrategy._with_averages",
        "        if self._opened is None:\n",
        "        if True:\n",
        "tests/test_trainer_habits.py -k averages_of_weights",
    ),
    Mutant(
        "habits: a callback saves shards",
        "SavingStrategy.save_checkpoint",
        "            refuse_saved_shards(checkpoint, record)\n",
        "            pass\n",
        "tests/test_trainer_habits.py -k saves_own_average",
    ),
    Mutant(
        "habits: a backward of a hook's own is not summed",
        "SteppingStrategy.behind_backward",
        "        return _OwnBackwards(self._run_own_backward)\n",
        "        return nullcontext()\n",
        "tests/test_trainer_habits.py -k twice_backward",
    ),
    Mutant(
        "habits: a backward of a hook's own reads shards",
        "SteppingStrategy._run_own_backward",
        "        self.pre_backward(loss)\n",
        "        self._sync.begin_backward()\n",
        "tests/test_trainer_habits.py -k penalised_behind",
    ),
    Mutant(
        "habits: a gradient of a loss passes for a constant",
        "once_differentiable",
        "        if not torch.is_grad_enabled():\n",
        "        if not torch.is_grad_enabled() or not any(isinstance(g, Tensor) and g.requires_grad for g in grads):\n",
        "tests/test_trainer_habits.py -k penalises_the_head",
    ),
    Mutant(
        "habits: a rate is found by one replica's losses",
        "SteppingStrategy.on_train_start",
        "            share_losses_of_finders(self._trainer.callbacks)  # type: ignore[attr-defined]\n",
        "            pass\n",
        "tests/test_trainer_habits.py -k rate_found",
    ),
    Mutant(
        "habits: a gradient penalty ends with torch's words",
        "refuse_second_derivative",
        '    if "once_differentiable" in str(error):\n',
        "    if False:\n",
        "tests/test_trainer_habits.py -k penalises_gradients",
    ),
    Mutant(
        "habits: rows that are logged end with torch's words",
        "SteppingStrategy._step",
        '("DTensor", "sharding strategy")',
        '("DTensor",)',
        "tests/test_trainer_habits.py -k penalised",
    ),
]


@dataclass(frozen=True)
class Span:
    """The lines of one definition, decorators included: ``[first, last)``."""

    file: Path
    first: int
    last: int

    def text(self, lines: Sequence[str]) -> str:
        return "".join(lines[self.first : self.last])


def definitions(package: Path) -> dict[str, list[Span]]:
    """Every definition of a package by qualified name: functions, methods and classes, and constants of modules."""
    found: dict[str, list[Span]] = {}

    def visit(parent: ast.AST, file: Path, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            names: list[str] = []
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names = [node.name]
                visit(node, file, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign) and not prefix:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
                visit(node, file, prefix)  # the body of an if, a try, a with
            if not names:
                continue
            first = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", []))])
            for name in names:
                found.setdefault(prefix + name, []).append(Span(file, first - 1, node.end_lineno or first))

    for file in sorted(package.rglob("*.py")):
        visit(ast.parse(file.read_text()), file, "")
    return found


def place_of(mutant: Mutant, known: Mapping[str, Sequence[Span]]) -> Span:
    """Where a fault's text stands.

    Raises:
        ValueError: if there is no such definition, more than one, or the text does not stand in it exactly once.
    """
    module, _, name = mutant.definition.rpartition(":")
    spans = [span for span in known.get(name, []) if module in ("", span.file.stem)]
    if not spans:
        raise ValueError(f"{mutant.name}: there is no definition {mutant.definition}")
    files = {span.file for span in spans}
    if len(files) > 1:
        stems = ", ".join(sorted(f"{file.stem}:{name}" for file in files))
        raise ValueError(f"{mutant.name}: {mutant.definition} is several definitions; name one of {stems}")
    lines = spans[0].file.read_text().splitlines(keepends=True)
    counts = [span.text(lines).count(mutant.old) for span in spans]  # a property has two of one name
    if sum(counts) != 1:
        raise ValueError(f"{mutant.name}: its text stands {sum(counts)} times in {mutant.definition}")
    return spans[counts.index(1)]


def arguments_of(mutant: Mutant, root: Path) -> list[str]:
    """A fault's arguments for pytest, each file of tests by its path in the repository at ``root``.

    Raises:
        ValueError: if no file below ``tests`` has such a name, several have it, or it has no test of the name behind ``::``.
    """
    found = []
    for word in mutant.tests.split():
        if not word.startswith("tests/"):
            found.append(word)
            continue
        name, colons, test = word.removeprefix("tests/").partition("::")
        files = sorted((root / "tests").rglob(name))
        if len(files) != 1:
            where = ", ".join(str(file.relative_to(root)) for file in files)
            problem = f"tests/{name} is several files: {where}" if files else f"there is no file {name} below tests"
            raise ValueError(f"{mutant.name}: {problem}")
        if colons and not re.search(rf"^def {re.escape(test.partition('[')[0])}\(", files[0].read_text(), re.M):
            raise ValueError(f"{mutant.name}: there is no {test} in {name}")
        found.append(f"{files[0].relative_to(root)}{colons}{test}")
    return found


def stale(package: Path) -> list[str]:
    """The faults that fit the source or the tests beside it no more, and why."""
    known, found = definitions(package), []
    for mutant in MUTANTS:
        try:
            place_of(mutant, known)
            arguments_of(mutant, package.parent)
        except ValueError as error:
            found.append(str(error))
    return found


def apply(mutant: Mutant, package: Path) -> None:
    """Put the fault into a copy of the package."""
    span = place_of(mutant, definitions(package))
    lines = span.file.read_text().splitlines(keepends=True)
    lines[span.first : span.last] = [span.text(lines).replace(mutant.old, mutant.new)]
    span.file.write_text("".join(lines))


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
        try:
            arguments = arguments_of(mutant, folder)
            apply(mutant, folder / "lightning_seqpar")
        except ValueError as error:
            return False, f"STALE: {error}"
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
            *arguments,
        ]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
        seen = re.search(r"^FAILED (.+?)(?: - |$)", done.stdout, re.M)
        if done.returncode == 1 and seen:
            return True, re.sub(r"^tests/(\w+/)?", "", seen.group(1))
        return (
            False,
            "SURVIVED" if done.returncode == 0 else f"pytest ended with {done.returncode}: {done.stdout[-300:]}",
        )


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        gone = stale(ROOT / "lightning_seqpar")
        print(*gone, f"{len(MUTANTS) - len(gone)} of {len(MUTANTS)} faults fit the source", sep="\n")
        return 1 if gone else 0
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.name for word in sys.argv[1:])]
    if not chosen:
        print(f"no fault has {' and '.join(sys.argv[1:])} in its name")
        return 1
    rows = []
    with ThreadPoolExecutor(2) as pool:
        for mutant, (caught, where) in zip(chosen, pool.map(run, chosen), strict=True):
            rows.append((mutant, caught, where))
            print(f"{'caught' if caught else 'ALIVE ':<7} {mutant.name:<48} {where}", flush=True)
    alive = sum(not caught for _, caught, _ in rows)
    print("\n| fault | in | first test that sees it |\n|---|---|---|")
    for mutant, _, where in rows:
        print(f"| {mutant.name} | `{mutant.definition}` | `{where}` |")
    print(f"\n{len(rows) - alive} of {len(rows)} faults caught")
    return 1 if alive else 0


if __name__ == "__main__":
    raise SystemExit(main())
