"""Make data/transcripts.txt: the embedded model's own answers, sampled; the haystack that the needle is planted in.

    python tools/make_transcripts.py

Transcripts with a run of three or more digits are dropped, so that nothing in the haystack can be mistaken for a
code. Seed, versions and sampling settings go into data/transcripts.json.
"""

import json
import re
from datetime import date
from pathlib import Path

import torch
from tqdm import tqdm

from pageskip_lib import load_model, runtime

SEED = 7
WANTED_TOKENS = 45_000
SAMPLING = dict(do_sample=True, temperature=0.9, top_p=0.95, max_new_tokens=480)
BATCH = 64
DATA = Path(__file__).resolve().parent.parent / "data"

SUBJECTS = """
how bread rises; why the sky changes colour at dusk; how a lighthouse keeper spends a winter; what a compiler does
how bees find their way home; why old bridges hum in the wind; how to tune a piano; what makes a river bend
why some stars look red; how a library decides what to keep; what a glacier leaves behind; how a sailing boat goes upwind
why cats purr; how paper is made; what an orchestra conductor is for; how mountains wear down
why leaves fall; how a clock keeps time; what makes a good map; how a seed knows when to sprout
why metals rust; how a choir breathes together; what a translator loses; how tea is dried
why rooms echo; how a potter centres clay; what a detective notices first; how salt preserves food
why deserts are cold at night; how glass is blown; what a gardener does in autumn; how whales talk
why ice floats; how a violin is built; what a farmer reads in the clouds; how a camera sees
why we forget dreams; how ants divide work; what a judge weighs; how a kite stays up
why tides come twice a day; how ink was made; what a shepherd knows about dogs; how a printing press changed towns
why spices were worth gold; how a dam holds water; what a nurse learns at night; how birds sleep
why mirrors swap left and right; how a story begins; what an editor cuts; how a valley fills with fog
why soap cleans; how rope is twisted; what a sculptor throws away; how a market sets a price
why onions make us cry; how a tunnel is dug; what a beekeeper fears; how snow turns into ice
""".replace("\n", ";").split(";")

FRAMES = ("Explain {}.", "Think step by step about {}.", "Tell a short story about {}.", "Write a letter to a friend about {}.")


def questions():
    """Every subject in every frame, so that no two transcripts answer the same question."""
    for frame in FRAMES:
        for subject in filter(None, map(str.strip, SUBJECTS)):
            yield frame.format(subject)


@torch.inference_mode()
def answers(model, tokenizer, batch):
    """Sampled answers to a batch of questions, as text."""
    chats = [[{"role": "user", "content": question}] for question in batch]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    outputs = model.generate(**inputs, **SAMPLING, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main():
    torch.manual_seed(SEED)
    model, tokenizer = load_model()
    tokenizer.padding_side = "left"  # generate() continues on the right
    kept, tokens, dropped = [], 0, 0
    asked = list(questions())
    with tqdm(total=WANTED_TOKENS, unit="token") as bar:
        for start in range(0, len(asked), BATCH):
            batch = asked[start : start + BATCH]
            for question, answer in zip(batch, answers(model, tokenizer, batch)):
                transcript = f"Question: {question}\n\n{answer.strip()}\n"
                if re.search(r"\d{3}", transcript):
                    dropped += 1
                    continue
                kept.append(transcript)
                tokens += len(tokenizer(transcript).input_ids)
            bar.update(min(tokens, WANTED_TOKENS) - bar.n)
            if tokens >= WANTED_TOKENS:
                break
    (DATA / "transcripts.txt").write_text("\n".join(kept), encoding="utf-8")
    provenance = dict(
        made_by="tools/make_transcripts.py", model="SmolLM2-135M-Instruct (Q4_1 weights)", licence="Apache-2.0", seed=SEED, batch=BATCH,
        sampling=SAMPLING, transcripts=len(kept), dropped_for_digits=dropped, tokens=tokens,
        machine=str(runtime.machine()), date=date.today().isoformat(),
    )  # fmt: skip
    (DATA / "transcripts.json").write_text(json.dumps(provenance, indent=1) + "\n", encoding="utf-8")
    print(f"{len(kept)} transcripts, {tokens:,} tokens, {dropped} dropped for digits")


if __name__ == "__main__":
    main()
