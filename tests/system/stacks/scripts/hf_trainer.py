"""Fine-tune a causal language model with the Trainer: https://huggingface.co/docs/transformers/training."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Words(Dataset):
    """Sequences in which each token follows from the one before."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(size)
        first = torch.randint(0, 64, (size, 1), generator=generator)
        self.tokens = (first + 3 * torch.arange(16)) % 64

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output_dir")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--eval-strategy", default="no")
    arguments = parser.parse_args()

    set_seed(42)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2))
    training_args = TrainingArguments(
        output_dir=arguments.output_dir,
        per_device_train_batch_size=arguments.batch_size,
        learning_rate=5e-4,
        lr_scheduler_type="linear",
        max_steps=arguments.max_steps,
        logging_steps=5,
        save_strategy="no",
        eval_strategy=arguments.eval_strategy,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=training_args, train_dataset=Words(4096), eval_dataset=Words(32))
    trainer.train()
    trainer.save_model()
    print(f"trained to step {trainer.state.global_step}")


if __name__ == "__main__":
    main()
