"""A byte-level BPE of the size and kind of GPT-2's, made in a moment.

Its 256 bytes and its special token have the places and the pre-tokenizer of
GPT-2's. Between them are merges, trained on words that are made here: English,
other scripts, emoji, numbers, runs of spaces. What is missing of GPT-2's number
of tokens are tokens that no text is encoded to.
"""

import functools
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

_NUM_TRAINED = 4_000
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
_MARKS = """. , ! ? : ; 's n't " ( ) -> == = + - * / ... €""".split()
_MARKS += ["\n", "\n\n", "\t", "  ", "    "]


def _words(rng: random.Random) -> list[str]:
  """The most frequent words first."""
  words = []
  for low, high in _SCRIPTS.values():
    for _ in range(400):
      length = rng.randint(1, 4)
      words.append("".join(map(chr, rng.choices(range(low, high), k=length))))
  words += [str(rng.randrange(10 ** rng.randint(1, 4))) for _ in range(400)]
  rng.shuffle(words)
  return [*_MARKS, *_ENGLISH, *words]


@functools.cache
def build() -> tokenizers.Tokenizer:
  """The same in each process."""
  rng = random.Random(0)
  words = _words(rng)
  weights = [1 / (1 + rank) ** 0.8 for rank in range(len(words))]  # as Zipf's
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
  vocabulary = settings["model"]["vocab"]
  for number in range(len(vocabulary), VOCAB_SIZE - 1):
    vocabulary[f"Ġunused{number}"] = number
  vocabulary[END] = VOCAB_SIZE - 1
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
