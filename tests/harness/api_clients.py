"""Asks a gateway by the Python packages that people use; a program for the Python of vLLM's environment.

    api_clients.py openai | anthropic | litellm URL KEY

What a prompt says decides what tests/integration/gateway/test_real_clients.py answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

TEXT = "abcde"


def says(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 9}


def fails(
    kind: type[BaseException] | tuple[type[BaseException], ...], ask: Callable[[], Any], word: str = ""
) -> None:
    """`ask` must raise this, and its text must name `word`."""
    try:
        ask()
    except kind as error:
        assert word in str(error), error
    else:
        raise AssertionError(f"{kind} did not come")


def of_openai(url: str, key: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    assert [one.id for one in client.models.list()] == ["m"]
    chat, completions, responses = client.chat.completions, client.completions, client.responses
    whole = chat.create(**says("hello"))
    assert (
        whole.choices[0].message.content == TEXT
        and whole.usage is not None
        and whole.usage.prompt_tokens == 11
    )
    parts = list(chat.create(**says("hello"), stream=True))
    assert "".join(one.choices[0].delta.content or "" for one in parts if one.choices) == TEXT
    assert completions.create(model="m", prompt="hello").choices[0].text == TEXT
    parts = list(completions.create(model="m", prompt="hello", stream=True))
    assert "".join(one.choices[0].text for one in parts) == TEXT
    assert responses.create(model="m", input="hello").output_text == TEXT
    events = list(responses.create(model="m", input="hello", stream=True))
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == TEXT
    assert events[-1].type == "response.completed"
    fails(openai.BadRequestError, lambda: chat.create(**says("bad")), "from the engine")
    fails(openai.RateLimitError, lambda: chat.create(**says("busy")), "from the engine")
    fails(openai.InternalServerError, lambda: chat.create(**says("crash")), "from the engine")
    fails(openai.NotFoundError, lambda: chat.create(**{**says("hello"), "model": "none"}), "none")
    stranger = client.with_options(api_key="of-somebody")
    fails(
        openai.AuthenticationError,
        lambda: stranger.chat.completions.create(**says("hello")),
        "not known here",
    )
    fails(Exception, lambda: list(chat.create(**says("broken"), stream=True)))
    stream = chat.create(**says("endless"), stream=True)
    next(iter(stream))
    stream.close()


def of_anthropic(url: str, key: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    whole = client.messages.create(**says("hello"))
    assert whole.content[0].text == TEXT and whole.usage.input_tokens == 11
    with client.messages.stream(**says("hello")) as stream:
        assert "".join(stream.text_stream) == TEXT
        assert stream.get_final_message().stop_reason == "end_turn"
    create = client.messages.create
    fails(anthropic.BadRequestError, lambda: create(**says("bad")), "from the engine")
    fails(anthropic.RateLimitError, lambda: create(**says("busy")), "from the engine")
    fails(anthropic.InternalServerError, lambda: create(**says("crash")), "from the engine")
    fails(anthropic.NotFoundError, lambda: create(**{**says("hello"), "model": "none"}), "{'type': 'error'")
    stranger = client.with_options(api_key="of-somebody")
    fails(
        anthropic.AuthenticationError,
        lambda: stranger.messages.create(**says("hello")),
        "{'type': 'error'",
    )
    fails(Exception, lambda: list(create(**says("broken"), stream=True)))
    events = create(**says("endless"), stream=True)
    next(iter(events))
    events.close()


def of_litellm(url: str, key: str) -> None:
    import litellm

    for model, base in (("openai/m", f"{url}/v1"), ("anthropic/m", url)):

        def ask(text: str, **more: Any) -> Any:
            given = {**says(text), "model": model, "api_base": base, "api_key": key, "num_retries": 0, **more}  # noqa: B023
            return litellm.completion(**given)

        whole = ask("hello")
        assert whole.choices[0].message.content == TEXT and whole.usage.prompt_tokens == 11
        parts = list(ask("hello", stream=True))
        assert "".join(one.choices[0].delta.content or "" for one in parts) == TEXT
        fails(litellm.BadRequestError, lambda: ask("bad"), "from the engine")
        fails(litellm.RateLimitError, lambda: ask("busy"), "from the engine")
        fails(litellm.InternalServerError, lambda: ask("crash"), "from the engine")
        fails(litellm.NotFoundError, lambda: ask("hello", model=model[:-1] + "none"), "none")  # noqa: B023
        fails(litellm.AuthenticationError, lambda: ask("hello", api_key="of-somebody"))
        fails(Exception, lambda: list(ask("broken", stream=True)))
    litellm.text_completion(
        model="text-completion-openai/m", prompt="hello", api_base=f"{url}/v1", api_key=key
    )


if __name__ == "__main__":
    {"openai": of_openai, "anthropic": of_anthropic, "litellm": of_litellm}[sys.argv[1]](*sys.argv[2:])
