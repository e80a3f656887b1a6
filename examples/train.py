"""Train the byte-level GPT by a YAML file: tensor + sequence parallel, or on one process with ``--single``.

python examples/train.py --config conf/demo.yaml
torchrun --nproc-per-node 2 examples/train.py --config conf/demo.yaml
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import lightning as L
from byte_gpt import ByteLM
from omegaconf import OmegaConf
from text_data import ByteWindows, read_text
from torch.utils.data import DataLoader

from lightning_seqpar import ParallelConfig, SeqParallelStrategy
from lightning_seqpar.measure import StepMeter
from lightning_seqpar.parity import ParityRecorder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="conf/demo.yaml")
    parser.add_argument("--single", action="store_true", help="one process, plain Lightning")
    parser.add_argument("--data", help="a file or folder to train on (default: the config's)")
    parser.add_argument("--out", type=Path, help="folder for the trace of the run")
    parser.add_argument(
        "overrides", nargs="*", help="such as trainer.limit_train_batches=50 strategy.sp=false model.tied=false"
    )
    args = parser.parse_args()
    config = OmegaConf.merge(OmegaConf.load(args.config), OmegaConf.from_dotlist(args.overrides))

    L.seed_everything(config.seed, verbose=False)
    text = read_text(args.data or config.data.path, config.data.limit)
    loader = DataLoader(ByteWindows(text, config.data.context), config.data.batch_size, shuffle=True, drop_last=True)
    model = ByteLM(**config.model, context=config.data.context)

    # The one line: everything else here is plain Lightning.
    strategy = "auto" if args.single else SeqParallelStrategy(config=ParallelConfig.from_omegaconf(config.strategy))
    recorder, meter = ParityRecorder(), StepMeter()
    trainer = L.Trainer(
        **{**config.trainer, **({"devices": 1} if args.single else {})},
        strategy=strategy,
        callbacks=[recorder, meter],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)

    if args.out is not None and trainer.is_global_zero:
        args.out.mkdir(parents=True, exist_ok=True)
        recorder.trace.save(args.out / "trace.pt")
        facts = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            # null where the run was too short for the meter's batch
            "saved_bytes": meter.saved_bytes if meter.measured else None,
            "calls": meter.calls if meter.measured else None,
            "bytes": meter.bytes if meter.measured else None,
        }
        (args.out / "facts.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*LeafSpec.*|.*does not have many workers.*")
    main()
