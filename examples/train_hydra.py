"""Train the byte-level GPT as Hydra composes it.

python examples/train_hydra.py strategy.tp=2
python examples/train_hydra.py +experiment=replicas trainer.max_steps=10
torchrun --nproc-per-node 2 examples/train_hydra.py strategy.tp=2 hydra.run.dir=runs/hydra/mine
"""

from __future__ import annotations

import lightning as L
from omegaconf import DictConfig

try:
    import hydra
    from hydra.utils import instantiate
except ImportError as error:
    raise ImportError("this example needs Hydra: pip install 'lightning-seqpar[hydra]'") from error


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(config: DictConfig) -> None:
    L.seed_everything(config.seed, verbose=False)
    trainer = instantiate(config.trainer, strategy=instantiate(config.strategy))
    trainer.fit(instantiate(config.model), instantiate(config.data))
    if trainer.is_global_zero:
        print(f"steps {trainer.global_step}, loss {float(trainer.callback_metrics['loss']):.6f}")


if __name__ == "__main__":
    main()
