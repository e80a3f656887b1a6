"""Train a Hugging Face model, as its library has it, on tokens of any text that the machine has.

python examples/finetune_hf.py                                  # examples/finetune_hf.yaml: two processes, tp=2
python examples/finetune_hf.py --model.folder=llama-folder      # start from a folder that save_pretrained wrote
python examples/finetune_hf.py --trainer.strategy.tp=1 --trainer.devices=1
seqpar plan examples/finetune_hf.yaml                           # what becomes of each module, before any launch
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from lightning.pytorch.callbacks import Callback
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.text_data import read_text
from lightning_seqpar import unshard, weights_from
from lightning_seqpar.cli import SeqParallelCLI

Batch = dict[str, Tensor]


class CausalLM(L.LightningModule):
    """A causal language model of transformers; the loss is the model's own.

    Args:
        folder: where ``save_pretrained`` left a model to start from; empty for a new one.
        model_type: family of a new model, as ``AutoConfig`` calls it.
        settings: of its configuration.
        lr: of AdamW.
    """

    def __init__(
        self, folder: str = "", model_type: str = "llama", settings: dict[str, Any] | None = None, lr: float = 1e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.folder, self.lr = folder, lr
        if folder:
            self.config = transformers.AutoConfig.from_pretrained(folder)
        else:
            self.config = transformers.AutoConfig.for_model(model_type, **(settings or {}))
        self.model: Any = None

    def configure_model(self) -> None:
        """On the meta device: no process ever holds the whole model."""
        if self.model is None:
            with torch.device("meta"):
                self.model = transformers.AutoModelForCausalLM.from_config(self.config)
            if self.folder:
                weights_from(self.model, self.folder)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class TokenData(L.LightningDataModule):
    """Windows of tokens; the tokenizer is trained on the text itself.

    Args:
        path: a file or a folder; none takes the standard library's sources.
        limit: bytes read at most.
        vocab_size: of the tokenizer.
        context: tokens in a window.
        batch_size: windows in a batch of one replica.
        folder: where the tokenizer is kept.
    """

    def __init__(
        self,
        path: str | None = None,
        limit: int = 1_000_000,
        vocab_size: int = 512,
        context: int = 96,
        batch_size: int = 8,
        folder: str = "runs/finetune/tokenizer",
    ) -> None:
        super().__init__()
        self.path, self.limit, self.vocab_size = path, limit, vocab_size
        self.context, self.batch_size, self.folder = context, batch_size, folder

    def prepare_data(self) -> None:
        """Byte-pair encoding, trained by one process."""
        text = read_text(self.path, self.limit).decode(errors="ignore")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            special_tokens=["<pad>", "<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
        fast.save_pretrained(self.folder)

    def setup(self, stage: str) -> None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder)
        ids = tokenizer(read_text(self.path, self.limit).decode(errors="ignore"))["input_ids"]
        count = len(ids) // self.context
        windows = torch.tensor(ids[: count * self.context]).view(count, self.context)
        self.items = [{"input_ids": window, "labels": window} for window in windows]

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.items, self.batch_size, shuffle=True, drop_last=True)  # type: ignore[arg-type]


class Losses(Callback):
    """What the first and the last steps lost."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def __str__(self) -> str:
        few = max(1, len(self.losses) // 10)
        first, last = (sum(part) / few for part in (self.losses[:few], self.losses[-few:]))
        return f"loss, mean of {few} steps: {first:.3f} at first, {last:.3f} at the end ({len(self.losses)} steps)"


def main() -> None:
    losses = Losses()
    cli = SeqParallelCLI(
        run=False,
        trainer_defaults={"callbacks": [losses]},
        save_config_callback=None,
        parser_kwargs={"default_config_files": [str(Path(__file__).with_suffix(".yaml"))]},
    )
    cli.trainer.fit(cli.model, cli.datamodule)
    unshard(cli.model)  # on every rank: the plain, whole model again
    if cli.trainer.is_global_zero:
        cli.model.model.save_pretrained("runs/finetune/model")
        print(f"\n{losses}\nthe model is in runs/finetune/model, its tokenizer in {cli.datamodule.folder}")


if __name__ == "__main__":
    main()
