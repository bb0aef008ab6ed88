"""Chat templates as of known models, shortened, and a tokenizer for them."""

import functools
import json
import pathlib
import tempfile

import tokenizers
from tokenizers import decoders
from tokenizers import pre_tokenizers

from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

END = "<|im_end|>"
# Qwen 2.5: passes over roles that it does not know.
QWEN = """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}
{%- else %}{{- 'You help.' }}{%- endif %}
{{- '\\n\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first)
   or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}
{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# Qwen 3: thoughts stand before the last answer, and a block is empty without.
THINKING = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- set content = message.content %}
{%- if message.role == 'assistant' %}
{%- set thoughts = message.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set thoughts = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1] %}
{%- endif %}
{%- if loop.last %}
{{- '<think>\\n' + thoughts.strip() + '\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
{{- content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# GLM 4: a turn ends where the next one begins.
ROLES = """{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""
# DeepSeek R1: the prompt opens the thoughts, which a turn then leaves out.
OPENED = """{%- for message in messages %}
{{- '<|' + message.role + '|>' + message.content.split('</think>')[-1] }}
{%- if message.role == 'assistant' %}{{- '<|im_end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\\n' }}{%- endif %}"""
# GLM 4.5: the same with calls, after which the tool's turn begins.
CALLING = ROLES.replace(
  " + message.content }}",
  """ + (message.content or '') }}
{%- for call in message.tool_calls %}
{{- call.function.name + '(' + (call.function.arguments | tojson) + ')' }}
{%- endfor %}""",
)
# DeepSeek V3: the arguments of a call have to be a text.
IN_JSON = CALLING.replace(" | tojson", "")
# gpt-oss: another name for the thoughts, and a content that may be missing.
NAMED = """{%- for message in messages %}
{{- '<|' + message.role + '|>' }}
{%- if message.thinking is defined %}{{- message.thinking + '|' }}{%- endif %}
{%- if message.content is defined %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls %}
{{- call.function.name + (call.function.arguments | tojson) }}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

TOOLS = [
  {
    "type": "function",
    "function": {
      "name": "weather",
      "description": "The weather of a city.",
      "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
      },
    },
  }
]
CALL = {
  "type": "function",
  "function": {"name": "weather", "arguments": {"city": "Zürich"}},
}
CALLED = [
  {"role": "user", "content": "How is it in Zürich?"},
  {"role": "assistant", "content": "", "tool_calls": [CALL]},
  {"role": "tool", "name": "weather", "content": '{"celsius": 21}'},
]


def save(
  directory: pathlib.Path, template: str, *, words=(), marks=(), **settings
) -> None:
  """Write a tokenizer of bytes, and a chat template.

  The end of a turn is in tokenizer_config.json alone.

  Args:
    directory: for the files.
    template: of the chat.
    words: ASCII words that are tokens; without any there are no merges.
    marks: further tokens with a meaning, which are not special.
    settings: of tokenizer_config.json.
  """
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocabulary = {token: i for i, token in enumerate(alphabet)}
  merges = []
  for word in words:
    for end in range(2, len(word) + 1):
      if word[:end] not in vocabulary:
        merges.append((word[: end - 1], word[end - 1]))
        vocabulary[word[:end]] = len(vocabulary)
  made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = decoders.ByteLevel()
  made.add_special_tokens(["<|endoftext|>"])
  directory.mkdir(parents=True, exist_ok=True)
  made.save(str(directory / "tokenizer.json"))
  special = {"<|im_start|>", END, "<|user|>", "<|assistant|>", "<|tool|>"}
  added = {
    str(len(vocabulary) + 1 + i): {
      "content": token,
      "special": token in special,
    }
    for i, token in enumerate([*sorted(special), "<think>", "</think>", *marks])
  }
  values = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END,
    "pad_token": "<|endoftext|>",
    "chat_template": template,
    "added_tokens_decoder": added,
    **settings,
  }
  path = directory / "tokenizer_config.json"
  path.write_text(json.dumps(values))


@functools.cache
def load(
  template: str,
) -> tuple[tokenizer_lib.Tokenizer, chat_template_lib.ChatTemplate]:
  """Return that tokenizer and its template."""
  with tempfile.TemporaryDirectory() as name:
    directory = pathlib.Path(name)
    save(directory, template)
    tokenizer = tokenizer_lib.load(directory)
    return tokenizer, chat_template_lib.load(directory)
