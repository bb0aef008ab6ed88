"""A byte-level BPE of the size and kind of GPT-2's, made in about a second.

Its 256 bytes, 50,000 merges and one special token have the places and the
pre-tokenizer of GPT-2's. The text is made here: syllables and a few English
words with Zipf's frequencies, other scripts, emoji, numbers, runs of spaces.
The first merges are trained on it; the rest join what those leave of a word
until it is one token, which is what training would do, and ten times faster.
"""

import functools
import itertools
import json
import pathlib
import random
import tempfile

import tokenizers

from jaxrl_async.text import tokenizer as tokenizer_lib

VOCAB_SIZE = 50_257
END = "<|endoftext|>"
GPT2 = pathlib.Path(__file__).parents[1] / "../shared/data/gpt2_tokenizer"
# The real one is tested too on machines that have it.
NAMES = ("made", "gpt2") if GPT2.is_dir() else ("made",)

_NUM_TRAINED = 6_000
_ENGLISH = """the of and to in a is that for it as was with be by on not he his
  but at are this have from or had an they which one you were all her she there
  would their we him been has when who will no more if out so said what up its
  about into than them can only other time new some could these two may first
  then do any like my now over such our man me even most made after also did
  many off before must well back through years where much your way down should
  because each just those people too little state good very make world still
  see own work men day get here between both long being under three never same
  another know while last might us great old year come since against go came
  right used take use does number answer question equals plus minus sum step
  Hello World Café naïve""".split()
_SCRIPTS = {
  "latin": (0xC0, 0x17F),
  "greek": (0x3B1, 0x3CA),
  "cyrillic": (0x430, 0x450),
  "hebrew": (0x5D0, 0x5EB),
  "kana": (0x3041, 0x3097),
  "han": (0x4E00, 0x5000),
  "emoji": (0x1F600, 0x1F650),
}
_MARKS = [".", ",", "!", "?", ":", ";", "'s", "n't", '"', "(", ")", "->", "=="]
_MARKS += [
  "=",
  "+",
  "-",
  "*",
  "/",
  "\n",
  "\n\n",
  "\t",
  "  ",
  "    ",
  "...",
  "€",
]


def _words(rng: random.Random) -> list[str]:
  """Distinct words, the most frequent first."""
  onsets = "b c d f g h j k l m n p r s t v w br cl dr pr sh st th tr é".split()
  nuclei = "a e i o u ai ea ou".split()
  codas = ["", "", "n", "s", "t", "r", "l", "ng", "ck", "st"]
  syllables = [
    "".join(parts) for parts in itertools.product(onsets, nuclei, codas)
  ]
  counts = rng.choices((1, 2, 3), (1, 4, 3), k=42_000)
  parts = iter(rng.choices(syllables, k=sum(counts)))
  words = ["".join(itertools.islice(parts, count)) for count in counts]
  words += [word.capitalize() for word in words[::9]]
  for low, high in _SCRIPTS.values():
    for _ in range(900):
      length = rng.randint(1, 4)
      words.append("".join(map(chr, rng.choices(range(low, high), k=length))))
  words += [str(rng.randrange(10 ** rng.randint(1, 4))) for _ in range(3_000)]
  rng.shuffle(words)
  return list(dict.fromkeys([*_MARKS, *_ENGLISH, *words]))


@functools.cache
def build() -> tokenizers.Tokenizer:
  """The same in each process."""
  rng = random.Random(0)
  words = _words(rng)
  weights = [1 / (1 + rank) ** 0.8 for rank in range(len(words))]
  text = rng.choices(words, weights, k=40_000)
  trained = tokenizers.Tokenizer(tokenizers.models.BPE())
  trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  trained.train_from_iterator(
    (" ".join(text[i : i + 50]) for i in range(0, len(text), 50)),
    tokenizers.trainers.BpeTrainer(
      vocab_size=256 + _NUM_TRAINED,
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
    ),
  )
  settings = json.loads(trained.to_str())
  vocabulary = dict.fromkeys(settings["model"]["vocab"])
  merges = dict.fromkeys(map(tuple, settings["model"]["merges"]))
  # Most words of a text follow a space.
  both = (x for word in words for x in (f" {word}", word))
  for encoded in trained.encode_batch(list(itertools.islice(both, 80_000))):
    if any(token.startswith("Ġ") for token in encoded.tokens[1:]):
      continue  # several words: no merge crosses them
    left = encoded.tokens[0]
    for right in encoded.tokens[1:]:
      if len(vocabulary) == VOCAB_SIZE - 1:
        break
      if left + right not in vocabulary:
        merges[left, right] = None
        vocabulary[left + right] = None
      left += right
  vocabulary[END] = None
  settings["model"]["vocab"] = {x: i for i, x in enumerate(vocabulary)}
  settings["model"]["merges"] = list(merges)
  made = tokenizers.Tokenizer.from_str(json.dumps(settings))
  made.decoder = tokenizers.decoders.ByteLevel()
  made.add_special_tokens([END])
  return made


@functools.cache
def load(name: str = "made") -> tokenizer_lib.Tokenizer:
  """Of `NAMES`, from a directory as of a pretrained model."""
  if name == "gpt2":
    return tokenizer_lib.load(GPT2)
  with tempfile.TemporaryDirectory() as directory:
    save(pathlib.Path(directory))
    return tokenizer_lib.load(directory)


def save(directory: pathlib.Path) -> None:
  """Writes what a pretrained model's directory has of it."""
  build().save(str(directory / "tokenizer.json"))
  settings = json.dumps({"model_max_length": 1_024})
  (directory / "tokenizer_config.json").write_text(settings)
