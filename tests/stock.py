"""Chat templates of our own with the quirks of well-known ones: what surrounds a turn, what they trim, rewrite and refuse.

`{| ... |}` stands for nothing special: every marker is one token of the tests' tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stock:
    """A template and what its tokenizer and model know."""

    template: str
    specials: tuple[str, ...]
    eos: str
    stops: tuple[str, ...]  # what the generation config lists
    bos: str = ""
    adds_bos: bool = False  # the tokenizer adds one too


# Llama 3: a system turn always, with the date of today in it; contents are trimmed; BOS printed, and added once more.
LLAMA3 = Stock(
    "{{- bos_token }}"
    "{%- if strftime_now is defined %}{%- set today = strftime_now('%d %b %Y') %}"
    "{%- else %}{%- set today = '26 Jul 2024' %}{%- endif %}"
    "{%- if messages[0]['role'] == 'system' %}{%- set told = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set told = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + today + '\\n\\n' + told + '<|eot_id|>' }}"
    "{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    eos="<|eot_id|>", stops=("<|eot_id|>",), bos="<|begin_of_text|>", adds_bos=True,
)  # fmt: skip

# Qwen 3: reasoning stays only in answers after the last question; the last answer always has a reasoning block, if an
# empty one; `enable_thinking: false` opens the answer with it.
QWEN3 = Stock(
    "{%- set ns = namespace(asked=0) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.asked = loop.index0 %}"
    "{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role != 'assistant' %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- else %}{%- set said = m.content %}{%- set thought = '' %}"
    "{%- if '</think>' in said %}{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.asked and (loop.last or thought) %}"
    "{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- said + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}",
    ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|endoftext|>"),
    eos="<|im_end|>", stops=("<|im_end|>", "<|endoftext|>"),
)  # fmt: skip

# Gemma 3: no system role (its text goes into the first question), `model` for the assistant, contents trimmed, roles
# must alternate; the end marker of a turn is not the tokenizer's eos.
GEMMA3 = Stock(
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set first = messages[0]['content'] + '\\n\\n' %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}{%- set first = '' %}{%- set loop_messages = messages %}{%- endif %}"
    "{%- for m in loop_messages %}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{%- endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' + (first if loop.first else '') }}"
    "{{ m['content'] | trim }}{{ '<end_of_turn>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    eos="<eos>", stops=("<eos>", "<end_of_turn>"), bos="<bos>", adds_bos=True,
)  # fmt: skip

# Mistral: no header for an answer, the system text moves to the last question, contents trimmed, roles must alternate.
MISTRAL = Stock(
    "{%- if messages[0]['role'] == 'system' %}{%- set told = messages[0]['content'] %}{%- set chat = messages[1:] %}"
    "{%- else %}{%- set told = '' %}{%- set chat = messages %}{%- endif %}{{- bos_token }}"
    "{%- set ns = namespace(last=0) %}{%- for m in chat %}{%- if m['role'] == 'user' %}{%- set ns.last = loop.index0 %}"
    "{%- endif %}{%- endfor %}"
    "{%- for m in chat %}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- if m['role'] == 'user' %}{{- '[INST] ' + (told + '\\n\\n' if told and loop.index0 == ns.last else '') }}"
    "{{- m['content'] | trim + '[/INST]' }}"
    "{%- else %}{{- ' ' + m['content'] | trim + eos_token }}{%- endif %}{%- endfor %}",
    ("<s>", "</s>", "[INST]", "[/INST]"),
    eos="</s>", stops=("</s>",), bos="<s>", adds_bos=True,
)  # fmt: skip

# gpt-oss: channels; an answer that is history ends by <|end|> and has lost its reasoning, the last one by <|return|>.
GPT_OSS = Stock(
    "{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '\\n\\nReasoning: ' }}"
    "{{- (reasoning_effort if reasoning_effort is defined else 'medium') + '<|end|>' }}"
    "{%- for m in messages %}{%- if m.role in ('system', 'developer') %}"
    "{{- '<|start|>developer<|message|># Instructions\\n\\n' + m.content + '<|end|>' }}"
    "{%- elif m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- if loop.last and not add_generation_prompt %}"
    "{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}",
    ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
    eos="<|return|>", stops=("<|return|>", "<|call|>"),
)  # fmt: skip

CHATML = Stock(
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    ("<|im_start|>", "<|im_end|>"),
    eos="<|im_end|>", stops=("<|im_end|>",),
)  # fmt: skip

STOCK = {"llama3": LLAMA3, "qwen3": QWEN3, "gemma3": GEMMA3, "mistral": MISTRAL, "gpt-oss": GPT_OSS, "chatml": CHATML}
