"""The one door to JetStream: its `Engine` interface and `ResultTokens`.

JetStream imports seqio for tokenizers that are not used here, and seqio
imports TensorFlow. Stubs stand in `sys.modules` while the interface is
imported and are removed after it, whether or not seqio is installed.
"""

import sys
import types
from typing import Any


def _import_engine_api():
  names = ("seqio", "seqio.vocabularies")
  saved = {name: sys.modules.pop(name, None) for name in names}
  package: Any = types.ModuleType(names[0])
  vocabularies: Any = types.ModuleType(names[1])
  for name in ("SentencePieceVocabulary", "Vocabulary"):
    setattr(vocabularies, name, type(name, (), {}))
  package.vocabularies = vocabularies
  sys.modules.update(zip(names, (package, vocabularies), strict=True))
  try:
    from jetstream.engine import engine_api
    from jetstream.engine import tokenizer_pb2
  finally:
    for name in names:
      del sys.modules[name]
      original = saved[name]
      if original is not None:
        sys.modules[name] = original
  return engine_api, tokenizer_pb2


engine_api, tokenizer_pb2 = _import_engine_api()
Engine = engine_api.Engine
ResultTokens = engine_api.ResultTokens
TokenizerParameters = tokenizer_pb2.TokenizerParameters
