"""A random tiny target and what it writes, without going through files."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from archsearch.text.cache import CachedSequence, CacheMeta, Fingerprint, TextCache

VOCAB, HIDDEN = 48, 32


def make_target(seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            bos_token_id=None,
            eos_token_id=None,
            initializer_range=0.3,
        )
    ).eval()


def make_cache(seed=0, count=48, target=None):
    """Greedy text of a random target; prompts of one length are written together."""
    target = target or make_target(seed)
    lengths = [(3 + i % 5, 6 + i % 7) for i in range(count)]  # of prompt and answer
    prompts = [
        torch.randint(0, VOCAB, (1, prompt), generator=torch.Generator().manual_seed(i))
        for i, (prompt, _) in enumerate(lengths)
    ]
    written = {}
    for length in {prompt for prompt, _ in lengths}:
        of_one = [i for i, (prompt, _) in enumerate(lengths) if prompt == length]
        ids = torch.cat([prompts[i] for i in of_one])
        with torch.no_grad():
            whole = target.generate(
                ids,
                max_new_tokens=max(lengths[i][1] for i in of_one),
                do_sample=False,
                attention_mask=torch.ones_like(ids),
                pad_token_id=0,
            )
        written |= dict(zip(of_one, whole, strict=True))
    sequences = []
    for i, (prompt, new) in enumerate(lengths):
        whole = written[i][: prompt + new].clone()
        with torch.no_grad():
            hidden = target.model(whole[None]).last_hidden_state[0, prompt - 1 : -1]
        sequences.append(CachedSequence(whole, prompt, hidden, whole[prompt:].clone(), "", str(i)))
    meta = CacheMeta(Fingerprint(f"target{seed}", "p", {"kind": "written"}), complete=True)
    return TextCache(None, meta, sequences, target.lm_head.weight.detach())
