"""Wrong configurations, YAML files, plans and launches, and the sentence that a user reads: field, value, rule, fix.

Everything here is refused before any process is started.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from omegaconf import OmegaConf

from lightning_seqpar import ParallelConfig, SeqParallelStrategy, ShardingPlan
from lightning_seqpar.strategy.model_setup import dense_parts
from tests.helpers.fit import quiet_trainer
from tests.mutants import sees

CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"tp": 0}, "tp=0: a size must be 1 or more; leave it out for 1"),
    ({"tp": "two"}, "tp='two': it counts ranks or steps; write a whole number"),
    ({"dp": "Auto"}, "dp='Auto': it counts ranks or steps; write a whole number or 'auto'"),
    ({"pp": 2, "pp_layers": [1, 2, 3]}, "write 2 numbers"),
    ({"pp": 2, "pp_layers": [0, 2]}, "pp_layers=[0, 2]: "),
    ({"pp": 2, "pp_layers": "9,9"}, "write a list of whole numbers"),
    ({"pp_layers": [3, 3]}, "write 1 number"),
    ({"virtual_pp": 2}, "virtual_pp=2 with pp=1: virtual stages interleave the stages of a pipeline; set pp to 2 or more"),
    ({"pp": 4, "pp_split_rank": 4}, "pp_split_rank=4: the decoder's first rank must lie inside the pipeline, between 1 and pp - 1 = 3"),
    ({"pp_split_rank": 1}, "set pp to 2 or more, or leave pp_split_rank out"),
    ({"check_every": -1}, "check_every=-1: write 0 for the default schedule or a number of steps"),
    ({"sp": "maybe"}, "sp='maybe': it is a switch; write true or false"),
    ({"cp_method": "ring"}, "cp_method='ring' with cp=1: it says how attention is computed across context-parallel ranks"),
    ({"data_parallel": "zero"}, "data_parallel='zero': it must be 'ddp', 'fsdp' or 'hsdp'"),
    ({"offload": "activations", "compile": True}, "offload='activations' with compile=True: a compiled block decides by itself what it keeps; use one of them"),
    ({"data_parallel": "hsdp"}, "fsdp={} with data_parallel='hsdp': hsdp, and it alone, needs the number of replicas that share out parameters, such as data_parallel: hsdp with fsdp: {shard_size: 8}"),
    ({"data_parallel": "fsdp", "fsdp": {"shard_size": 2}}, "fsdp={'shard_size': 2} with data_parallel='fsdp': hsdp, and it alone, needs"),
    ({"data_parallel": "hsdp", "fsdp": {"shard_size": "two"}}, "fsdp={shard_size: 'two'}: it counts replicas; write a whole number, 2 or more"),
    ({"recompute": False}, "recompute=False: it must be 'none', 'activations', 'selective' or 'full'"),
    ({"regather": "always"}, "regather='always': it is a switch; write true or false"),
    ({"order": "tp-dp"}, "order='tp-dp': it must name pp, dp, cp, tp once each, joined by '-', outermost first; for example 'pp-dp-cp-tp'"),
    ({"timeout": 0}, "timeout=0: a collective needs a positive number of seconds, such as 600"),
    ({"timeout": "soon"}, "timeout='soon': write a number of seconds, such as 600, or hours:minutes:seconds, such as 0:10:00"),
    ({"plan": ""}, "plan='': write 'auto', a family's name, the path of a YAML file, or rules"),
    ({"plan": {"base": "none", "rule": []}}, "'rule' is not a field of PlanSpec; did you mean 'rules'?"),
    ({"plan": ["a"]}, "rules=['a']: write a mapping of options, such as {name: value}"),
    ({"checkpoint": "single"}, "'single' is no CheckpointConfig; write a mapping with some of its fields (format, async_save, ...)"),
    ({"checkpoint": {"async_save": True}}, "checkpoint.async_save=True with format='single': one file is assembled by one rank while all wait; use"),
    ({"tensor_parallel_size": 2}, "'tensor_parallel_size' is not a field of ParallelConfig; did you mean 'tp'?"),
    ({"gradient_checkpointing": True}, "'gradient_checkpointing' is not a field of ParallelConfig; did you mean 'recompute'?"),
]  # fmt: skip

STRATEGIES: list[tuple[dict[str, Any], str]] = [
    ({"config": ParallelConfig(tp=2), "sp": False}, "sp=False stands beside config=; put it into the config, ParallelConfig(..., sp=False), or drop config="),
    ({"config": ParallelConfig().model_copy(update={"tp": 0})}, "tp=0: a size must be 1 or more; leave it out for 1"),
    ({"cp": 2, "compile": True}, "cp=2 with compile=True: sequences of which ranks hold parts are not traced; use compile=False, or cp=1"),
    ({"pp": 2, "virtual_pp": 2, "pp_layers": [2, 2]}, "pp_layers=[2, 2] with pp=2, virtual_pp=2: it says of each chunk, in the model's order, how many blocks it has; write 4 numbers"),
    ({"fp8_groups": True}, "fp8_groups=True with float8='none': it says of what scales are; set float8, or leave fp8_groups out"),
    ({"fsdp": {"reshard_after_forward": True}}, "fsdp={'reshard_after_forward': True} beside data_parallel='ddp': nothing reads it; set data_parallel='fsdp', or leave it out"),
    ({"data_parallel": "fsdp", "fsdp": {"units": 5}}, "fsdp={'units': 5}: give a list of patterns, such as ['model.layers.*'], or an empty list"),
    ({"data_parallel": "fsdp", "fsdp": {"reshard": True}}, "fsdp={'reshard': ...}: there is no such option; did you mean 'shard_size', 'reshard_after_forward'"),
    ({"data_parallel": "fsdp", "fsdp": {"reshard_after_forward": 4}}, "fsdp={'reshard_after_forward': 4}: use true (blocks are gathered once more in the backward) or false"),
    ({"data_parallel": "fsdp", "fsdp": {"mp_policy": "bf16"}}, "fsdp={'mp_policy': 'bf16'}: give a mapping, such as {param_dtype: bfloat16, reduce_dtype: float32}"),
    ({"data_parallel": "fsdp", "fsdp": {"mp_policy": {"param": 1}}}, "fsdp={'mp_policy': {'param': ...}}: there is no such field; did you mean 'param_dtype'"),
    ({"data_parallel": "fsdp", "fsdp": {"mp_policy": {"param_dtype": "bf16"}}}, "fsdp={'mp_policy': {'param_dtype': 'bf16'}}: it is no floating-point type; use one of bfloat16, float16"),
    ({"data_parallel": "fsdp", "fsdp": {"offload_policy": "cpu"}}, "fsdp={'offload_policy': 'cpu'}: use true (keep it all on the CPU) or false"),
    ({"compile": True, "recompute": "selective"}, "recompute='selective' with compile=True: a part of a block can't be run again from inside its one graph"),
    ({"compile_options": {"backend": "eager"}}, "compile_options={'backend': 'eager'} with compile=False: nothing is compiled; set compile to true"),
    ({"compile": True, "compile_options": {"backends": "eager"}}, "compile_options={'backends': ...}: it is not passed on; did you mean 'backend'"),
    ({"compile": True, "compile_options": {"fullgraph": False}}, "compile_options={'fullgraph': ...}: the strategy sets fullgraph itself; leave it out"),
    ({"compile": True, "compile_options": {"backend": "inductr"}}, "compile_options={'backend': 'inductr'}: torch knows no such backend; did you mean 'inductor'"),
    ({"compile": True, "compile_options": {"mode": "fast"}}, "compile_options={'mode': 'fast'}: write one of inductor's modes (default, "),
    ({"compile": True, "compile_options": {"dynamic": "on"}}, "compile_options={'dynamic': 'on'}: write true, false or null"),
    ({"ddp": {"find_unused": True}}, "ddp={'find_unused': ...}: DistributedDataParallel has no such option; did you mean 'find_unused_parameters'"),
    ({"ddp": {"process_group": 1}}, "ddp={'process_group': ...}: the strategy sets process_group itself; leave it out"),
    ({"plan": "bytegpt"}, "plan='bytegpt' is no family; did you mean 'byte_gpt'? (a file ends in .yaml)"),
    ({"plan": "nowhere.yaml"}, "plan 'nowhere.yaml': no such file; give a YAML file, a family ("),
    ({"plan": "none"}, "plan='none' has no rules; write plan={'base': 'none', 'rules': [...]}"),
    ({"plan": {"base": "none"}}, "plan={'base': 'none'} without rules shards nothing; add rules, or use base: auto"),
    ({"plan": [{"pattern": "a", "style": "colum"}]}, "plan rule {'pattern': 'a', 'style': 'colum'}: no style 'colum'; did you mean 'column'"),
    ({"plan": [{"pattern": "a..b", "style": "row"}]}, "pattern='a..b': write names joined by single dots, '*' for one name, '{a,b}' for alternatives"),
    ({"plan": [{"pattern": "{a,b", "style": "row"}]}, "pattern='{a,b': a brace is not closed; write alternatives as '{a,b}'"),
    ({"plan": [{"pattern": "a", "style": "column", "segments": 0}]}, "segments=0: write a number of equal parts (3), their names ([q, k, v]) or their sizes"),
    ({"plan": [{"pattern": "a", "style": "gather", "args": [0, 0]}]}, "args=[0, 0]: name each argument once, by position or keyword"),
]  # fmt: skip


class OwnSync(TorchSyncBatchNorm):
    """A plugin as a user writes one."""


LAUNCHES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"tp": 2}, {"devices": 3}, "world size 3 does not divide by tp 2 × cp 1 × pp 1 = 2; use 2 or 4 processes (devices × num_nodes), or tp=1 or 3"),
    ({"tp": 2, "dp": 3}, {"devices": 4}, "dp=3: dp 3 × tp 2 × cp 1 × pp 1 = 6 ranks, but the world has 4; use dp=2 (or 'auto'), or start 6 processes"),
    ({"tp": 2, "process_group_backend": "glo"}, {"devices": 2}, "process_group_backend='glo': torch knows no 'glo'; did you mean 'gloo'"),
    ({"tp": 2, "process_group_backend": "cpu:mpi"}, {"devices": 2}, "process_group_backend='cpu:mpi': this build of torch has no mpi; use 'gloo'"),
    ({"tp": 2, "process_group_backend": "nccl"}, {"devices": 2}, "process_group_backend='nccl' with accelerator='cpu': nccl speaks between GPUs; use 'gloo'"),
    ({"tp": 2}, {"devices": 2, "plugins": [OwnSync()]}, "plugins=[OwnSync()]: a LayerSync plugin of yours would exchange modules of a model that is sharded; use Trainer(sync_batchnorm=True)"),
]  # fmt: skip

FILES: list[tuple[str, list[str], str]] = [
    ("- 1\n", [], "must hold a mapping such as 'tp: 2', not a list or a word"),
    ("tp: [2\n", [], "is not YAML: "),
    ("tp: ${nope}\n", [], "the parallel config can't be resolved: Interpolation key 'nope' not found"),
    ("tp: 2\n", ["tp"], "override 'tp': write it as field=value, such as 'tp=4'"),
    (
        "strategy: {tp: 2}\n",
        [],
        "'strategy' stands in the parallel config, which holds the fields themselves (tp: 2, sp: true); pass what stands below strategy",
    ),
    (
        "recompute: off\n",
        [],
        "recompute=False: it must be 'none', 'activations', 'selective' or 'full' (YAML reads a bare off or no as false; write the word in quotes)",
    ),
]

PLAN_FILES: list[tuple[str, str]] = [
    ("rules: 3\n", "it must hold a list 'rules', for example"),
    ("plan: {rules: []}\n", "'rules' stands under 'plan' there; in a plan's own file it stands at the top"),
    ("rules: [{pattern: a, style: row\n", "is not YAML: "),
    ("rules: []\nrules: [{pattern: a, style: row}]\n", "is not YAML: found duplicate key 'rules'; write it once"),
    (
        "base: auto\nrules: []\n",
        "'base' is no key of a plan's file, which holds a list 'rules'; give it in the field plan, {base: auto, ",
    ),
    ("rules: [{pattern: a, style: rows}]\n", "no style 'rows'; did you mean 'row', 'blocks'?"),
]


@sees(
    "message without its fix",
    "ParallelConfig.numbers_are_large_enough",
    "a size must be 1 or more; leave it out for {'1' if info.field_name != 'dp' else repr('auto')}",
    "a size must be 1 or more",
    case="{'tp': 0}",
)
@sees(
    "synonyms forgotten",
    "nearest",
    "    if SYNONYMS.get(word) in known:\n",
    "    if word in known:\n",
    case="{'tensor_parallel_size': 2}",
)
@pytest.mark.parametrize(("fields", "says"), CONFIGS, ids=[str(fields) for fields, _ in CONFIGS])
def test_a_wrong_config(fields, says):
    for build in (lambda: ParallelConfig(**fields), lambda: ParallelConfig.from_omegaconf(fields)):
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - the sentence is compared below
            build()
        assert says in str(raised.value)
        assert "errors.pydantic.dev" not in str(raised.value)


@pytest.mark.parametrize(("arguments", "says"), STRATEGIES, ids=[str(arguments)[:60] for arguments, _ in STRATEGIES])
def test_a_wrong_strategy(arguments, says):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        SeqParallelStrategy(**arguments)
    assert says in str(raised.value)


@sees(
    "a LayerSync plugin runs on a sharded model",
    "check_layer_sync",
    "if plugin is not None and",
    "if plugin is None and",
    case="({'tp': 2}, {'devices': 2, 'plugins': [<tests.unit.test_bad_input.OwnS",
)
@pytest.mark.parametrize(("arguments", "trainer", "says"), LAUNCHES, ids=[str(one[:2])[:70] for one in LAUNCHES])
def test_a_wrong_launch(arguments, trainer, says):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        quiet_trainer(strategy=SeqParallelStrategy(**arguments), **trainer)
    assert says in str(raised.value)


@pytest.mark.parametrize(("text", "overrides", "says"), FILES, ids=[text.strip() + str(o) for text, o, _ in FILES])
def test_a_wrong_file(text, overrides, says, tmp_path):
    (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        ParallelConfig.from_yaml(tmp_path / "wrong.yaml", overrides=overrides)
    assert says in str(raised.value)


@sees(
    "a plan's key may stand twice",
    "UniqueKeysLoader.construct_mapping",
    "            if any(key.value == other.value for other in keys[:at]):",
    "            if False:",
    case="rules: []\\nrules: [{pattern: a, style: row}]",
)
@pytest.mark.parametrize(("text", "says"), PLAN_FILES, ids=[text.strip() for text, _ in PLAN_FILES])
def test_a_wrong_plan_file(text, says, tmp_path):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        SeqParallelStrategy(plan=str(tmp_path / "plan.yaml"))
    assert says in str(raised.value)


def test_what_is_no_config_at_all():
    with pytest.raises(ValueError, match=r"config file 'nope.yaml' does not exist; give the path of a YAML file"):
        ParallelConfig.from_yaml("nope.yaml")
    for nothing in (3, None, [1], OmegaConf.create([1])):
        with pytest.raises(ValueError, match=r"a parallel config must be a mapping such as \{'tp': 2\}, got"):
            ParallelConfig.from_omegaconf(nothing)
    with pytest.raises(ValueError, match="plan rule 3: a rule is a mapping with at least 'pattern' and 'style'"):
        ShardingPlan.from_rules([3])


def test_a_sparse_buffer_is_sent_by_its_parts_or_refused():
    sparse = torch.eye(3).to_sparse()
    dense_parts(sparse)[1].fill_(2.0)
    assert torch.equal(sparse.to_dense(), 2 * torch.eye(3))
    with pytest.raises(ValueError, match=r"layout torch\.sparse_csr can't be sent to the other ranks; register it dense"):
        dense_parts(torch.eye(3).to_sparse_csr())
