"""Rewards for GRPO: https://huggingface.co/docs/trl/grpo_trainer#using-a-custom-reward-function."""


def brevity(completions, **kwargs):
    return [-float(len(completion)) for completion in completions]


def digits(completions, **kwargs):
    return [float(sum(map(str.isdigit, completion))) for completion in completions]
