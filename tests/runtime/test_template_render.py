"""Hostile templates are refused within the limits; whatever honest ones need is there."""

from __future__ import annotations

import datetime
import sys

import pytest

from chapbook.kernels.errors import TemplateRefused
from chapbook.runtime.template_child import make_environment
from chapbook.runtime.template_render import FROZEN_NOW, RenderResult, render_all

MESSAGES = [{"role": "user", "content": "hi"}]


def render(template: str, **variables: object) -> RenderResult:
    (result,) = render_all(template, [{"messages": MESSAGES, **variables}])
    return result


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{{ '' | attr('__class__') }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ joiner.__init__ }}",
        "{{ (messages | map('upper')).gi_frame }}",
    ],
)
def test_a_template_that_reaches_out_of_the_sandbox_is_refused(template: str) -> None:
    with pytest.raises(TemplateRefused, match=r"it (reaches for the attribute|leaves the sandbox)"):
        render(template)


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits: only the timeout holds there")
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 2 s of CPU"),
        ("{{ 'x' * 10 ** 10 }}", "more than 1024 MB of memory"),
        ("{{ '%10000000000d' % messages | length }}", "more than 1024 MB of memory"),
        ("{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}", "output is too long"),
        ("{{ range(10 ** 9) | list }}", "range of 1,000,000,000 numbers"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses without end"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recurses without end"),
        ("{{ lipsum() }}", "something random"),
        ("{{ messages | random }}", "something random"),
    ],
)
def test_a_template_that_breaks_a_limit_is_refused_and_told_which(template: str, reason: str) -> None:
    with pytest.raises(TemplateRefused, match=reason) as refused:
        render(template)
    assert 'template = "chatml"' in str(refused.value)


def test_a_template_that_takes_too_long_is_ended_by_the_parent() -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateRefused, match=r"longer than 0\.4 s"):
        render_all(loop, [{"messages": MESSAGES}], timeout_s=0.4)


@pytest.mark.parametrize("template", ["{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% extends 'x' %}"])
def test_no_file_can_be_loaded(template: str) -> None:
    assert render(template).text is None


def test_a_template_may_refuse_one_request_and_take_the_next() -> None:
    template = "{% if n == 1 %}{{ raise_exception('not this one') }}{% endif %}{{ n }}"
    template += "{{ strftime_now(' %Y') }}"
    first, second = render_all(template, [{"n": 1}, {"n": 2}])
    assert first.text is None
    assert "not this one" in first.refusal
    assert second == RenderResult(text="2 2024")


def test_bad_syntax_is_a_refusal_of_every_request() -> None:
    results = render_all("{% if %}", [{}, {}])
    assert ["does not compile" in result.refusal for result in results] == [True, True]


def test_one_render_cannot_change_the_inputs_of_the_next() -> None:
    shared = {"messages": MESSAGES}
    template = "{% set _ = messages.append(messages[0]) %}{{ messages | length }}"
    assert [result.text for result in render_all(template, [shared, shared])] == ["2", "2"]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{% for n in [1, 2, 3] %}{% if n == 2 %}{% continue %}{% endif %}{{ n }}{% endfor %}", "13"),
        ("{% for n in [1, 2, 3] %}{{ n }}{% break %}{% endfor %}", "1"),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{{ 'Today is ' + datetime }}", "Today is 2024-07-26"),
        ("{{ {'é': [1]} | tojson }}", '{"é": [1]}'),
        ("{{ {'b': 1, 'a': '<'} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":"<","b":1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ messages[0].items() | map('first') | tojson }}", '["role", "content"]'),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
        ("{% set ns = namespace(a=[]) %}{% set _ = ns.a.append(1) %}{{ ns.a }}", "[1]"),
        ("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}", "ab"),
    ],
)
def test_what_honest_templates_need_is_there(template: str, text: str) -> None:
    environment = make_environment(datetime.datetime.fromisoformat(FROZEN_NOW))
    assert environment.from_string(template).render(messages=[dict(message) for message in MESSAGES]) == text
