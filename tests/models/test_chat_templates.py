"""Chat templates: the same text and ids as transformers, errors that say what is wrong, and a sandbox that holds."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from regard.models import Tokenizer, load

LLAMA = Path(__file__).parents[1] / "checkpoints" / "llama"
TEMPLATES = {
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "default system": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}",
    "dated": "{{- bos_token }}\n{%- set date = strftime_now('%d %b %Y') %}\n{{- 'Today Date: ' + date + '\n\n' }}\n"
    "{% for message in messages %}\n    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
    "message['content'] | trim + '<|eot_id|>' }}\n{% endfor %}\n{% if add_generation_prompt %}\n"
    "    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{% endif %}",
    "alternating": "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 "
    "% 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}"
    "{% generation %}{{ message['content'] + "
    "eos_token }}{% endgeneration %}{% endif %}{% endfor %}",
    "renamed": "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message.role == 'assistant' else "
    "message.role %}{{ '<start_of_turn>' ~ role ~ '\n' ~ (message['content'] | trim) ~ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
    "tools": "{% macro line(x) %}{{ x.function.name }}: {{ x | tojson }}\n{% endmacro %}{% if tools %}{{ tools | "
    "tojson(indent=2) }}\n{% for t in tools %}{% if t.function.name == 'hidden' %}{% continue %}{% endif %}"
    "{{ line(t) }}{% endfor %}{% endif %}"
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }} "
    "{{ m.role }}: {{ m.content or '' }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\n{% endfor %}",
}
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": " Hello, naïve <world> & 'you' "},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "你好?"},
]
TOOLS = [{"type": "function", "function": {"name": n, "description": "façade <b>"}} for n in ("add", "hidden")]
CALLS = [
    TURNS[0],
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "3"},
]
CONVERSATIONS = [
    ("chatml", TURNS, None),
    ("chatml", [SYSTEM, *TURNS], None),
    ("default system", TURNS, None),
    ("default system", [SYSTEM, TURNS[0]], None),
    ("dated", [SYSTEM, *TURNS], None),
    ("alternating", TURNS, None),
    ("alternating", TURNS[:2], None),
    ("renamed", TURNS, None),
    ("tools", CALLS, TOOLS),
    ("tools", TURNS, None),
]
MARKS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"]


def backend():
    """A tokenizer that puts ``<s>`` before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Backend(models.BPE({c: i for i, c in enumerate(MARKS + alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(MARKS)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(LLAMA, tmp_path / "model")
    backend().save(str(tmp_path / "model" / "tokenizer.json"))
    return tmp_path / "model"


def state(folder, stated):
    about = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about | stated), encoding="utf-8")


def speaker(template):
    templates = {"default": template}
    return Tokenizer(backend(), 0, 1, chat_templates=templates, named_tokens={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("prompting", [True, False])
def test_texts_and_ids_equal_transformers(folder, prompting):
    transformers = pytest.importorskip("transformers")
    state(folder, {"chat_template": [{"name": n, "template": t} for n, t in TEMPLATES.items()]})
    ours = load(folder).tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for name, messages, tools in CONVERSATIONS:
        how = {"add_generation_prompt": prompting, "tools": tools}
        text = ours.chat(messages, template=name, **how)
        assert text == theirs.apply_chat_template(messages, chat_template=name, tokenize=False, **how)
        ids = ours.chat_ids(messages, template=name, **how)
        assert ids == theirs.apply_chat_template(messages, chat_template=name, **how)["input_ids"]
        assert ids.count(0) == text.count("<s>") <= 1


def test_templates_in_files_come_first_and_are_saved(folder, tmp_path):
    state(folder, {"chat_template": "old"})
    (folder / "chat_template.jinja").write_text(TEMPLATES["chatml"], encoding="utf-8")
    model = load(folder)
    assert model.tokenizer.chat_templates == {"default": TEMPLATES["chatml"]}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATES["tools"], encoding="utf-8")
    model = load(folder)
    assert model.tokenizer.chat_templates == {"default": TEMPLATES["chatml"], "tool_use": TEMPLATES["tools"]}
    assert model.tokenizer.chat(CALLS, tools=TOOLS) == model.tokenizer.chat(CALLS, tools=TOOLS, template="tool_use")
    model.save(tmp_path / "saved")
    again = load(tmp_path / "saved").tokenizer
    assert again.chat_templates == model.tokenizer.chat_templates


@pytest.mark.parametrize(
    ("name", "end"),
    [("chatml", ["<|im_end|>"]), ("alternating", ["</s>"]), ("renamed", ["<end_of_turn>"]), ("tools", [])],
)
def test_the_end_of_a_turn_is_read_off_the_template(name, end):
    tokenizer = speaker(TEMPLATES[name])
    assert [MARKS[i] for i in tokenizer.turn_end_ids()] == end


def test_messages_are_not_changed():
    messages = [{"role": "user", "content": "a", "more": [1]}]
    with pytest.raises(ValueError, match="sandbox"):
        speaker("{% set _ = messages[0].more.append(2) %}").chat(messages)
    assert messages == [{"role": "user", "content": "a", "more": [1]}]


WRONG = [
    (ValueError, "template: the checkpoint states no chat_template", Tokenizer(backend()), TURNS, {}),
    (ValueError, "roles must alternate", speaker(TEMPLATES["alternating"]), [TURNS[1]], {}),
    (ValueError, "template: expected a jinja template, got an error in line 2", speaker("a\n{% if %}"), TURNS, {}),
    (ValueError, r"template: expected a name \(default\) or a template's text, got 'none'", speaker("a"), TURNS,
     {"template": "none"}),
    (TypeError, "template: expected a name", speaker("a"), TURNS, {"template": 3}),
    (ValueError, r"messages\[1\]: expected content, got role alone", speaker("a"), [TURNS[0], {"role": "user"}], {}),
    (ValueError, r"messages\[0\]: expected a role", speaker("a"), [{"content": "a"}], {}),
    (TypeError, r"messages\[0\]: expected content as text", speaker("a"), [{"role": "user", "content": 3}], {}),
    (TypeError, r"messages\[0\]: expected an object", speaker("a"), ["hello"], {}),
    (TypeError, "messages: expected a list of messages", speaker("a"), "hello", {}),
    (ValueError, "messages: expected at least one message", speaker("a"), [], {}),
    (TypeError, "tools: expected a list of JSON schemas", speaker("a"), TURNS, {"tools": [print]}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "words", "tokenizer", "messages", "how"), WRONG, ids=[w[1][:40] for w in WRONG])
def test_what_is_wrong_is_named(kind, words, tokenizer, messages, how):
    with pytest.raises(kind, match=words):
        tokenizer.chat(messages, **how)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(100) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10000000 }}",
        "{{ 'a'.center(10**10) }}",
        "{{ 'a' | center(10**10) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**10) }}",
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
    ],
)
def test_hostile_templates_end_with_an_error(template):
    with pytest.raises(ValueError, match=r"^(template|messages): "):
        speaker(template).chat(TURNS)
