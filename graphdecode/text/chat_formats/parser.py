"""The parser of outputs: one for all chat formats, which are data."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

from graphdecode.text.chat_formats.arguments import is_json, json_value, read_arguments, text_of
from graphdecode.text.chat_formats.chat_format import (
    CallSyntax,
    Channels,
    ChatFormat,
    JsonCall,
    LiteralArguments,
    Thinking,
    Tools,
)
from graphdecode.text.chat_formats.events import CallArguments, CallEnd, CallStart, Content, Reasoning, ReplyEvent
from graphdecode.text.chat_formats.source import NoCallError, Reading, Sink, TextSource, words

_ID_LETTERS, _ID_LENGTH = string.ascii_letters + string.digits, 9  # Mistral's templates refuse other ids
_MOST_SPACES = 64  # before a marker, which are no content
_BETWEEN = ("\n", ";", " ")  # between two calls, or after the last one
# characters that may be read again, for each of the text and beside, so that the time stays in proportion to it
_REREAD, _REREAD_FIRST = 8, 1 << 14


class _Held:
    """Passes text on without its last spaces, until it is known whether they belong to it."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._spaces = ""

    def add(self, piece: str) -> None:
        """Take a piece of the text."""
        text = self._spaces + piece
        end = len(text) - min(len(text) - len(text.rstrip()), _MOST_SPACES)
        self._spaces = text[end:]
        self._sink(text[:end])

    def release(self) -> None:
        """Pass the spaces on."""
        self._sink(self._spaces)
        self._spaces = ""


class _Call:
    """A call that is being read: its events come at once if it is constrained, else once it is complete."""

    def __init__(self, parser: ReplyParser) -> None:
        self._parser = parser
        self._arguments: list[str] = []
        self._call_id: str | None = None
        self.name: str | None = None
        self.index = -1  # once it began
        self._is_finished = False

    @property
    def is_open(self) -> bool:
        """Whether its beginning was told, and its end not yet."""
        return self.index >= 0 and not self._is_finished

    def named(self, name: str, *, call_id: str | None = None, number: int | None = None) -> None:
        """Take the name of the function; raises NoCallError for an unknown one."""
        if name not in self._parser.tools:
            raise NoCallError
        self.name = name
        self._call_id = call_id or self._parser.call_id(name, number)
        if self._parser.is_constrained:
            self._begin()
            arguments, self._arguments = self._arguments, []
            for piece in arguments:
                self.argue(piece)

    def argue(self, piece: str) -> None:
        """Take a piece of the arguments."""
        if self.index >= 0:
            self._parser.emit(CallArguments, piece, self.index)
        else:
            self._arguments.append(piece)

    def finish(self) -> None:
        """End a call that is complete; raises NoCallError if it is none."""
        if self.index < 0:
            arguments = "".join(self._arguments) or "{}"
            if arguments.startswith('"') and is_json(arguments):  # JSON within JSON
                arguments = json.loads(arguments)
            arguments = "{}" if arguments == "null" else arguments
            if self.name is None or not arguments.startswith("{") or not is_json(arguments):
                raise NoCallError
            self._begin()
            self._parser.emit(CallArguments, arguments, self.index)
        self._is_finished = True
        self._parser.emit(CallEnd, "", self.index)

    def _begin(self) -> None:
        assert self.name is not None
        assert self._call_id is not None
        self.index = self._parser.num_calls
        self._parser.num_calls += 1
        self._parser.emit(CallStart, "", self.index, self._call_id, self.name)


class ReplyParser:
    """Parses an output, which comes in pieces, into events.

    Args:
        chat_format: how the model writes.
        tools: functions that may be called, with the schemas of their parameters; empty: no calls are looked for.
        in_reasoning: the prompt ends within the thought.
        is_constrained: a grammar makes the calls, so that their arguments come as they are written. Else a call comes
            once it is complete, and what is no call is content.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        *,
        tools: Tools,
        in_reasoning: bool = False,
        is_constrained: bool = False,
    ) -> None:
        self._format = chat_format
        self.tools = tools
        self.is_constrained = is_constrained
        self.num_calls = 0  # begun so far
        self.is_cut = False  # the output ended within a call
        self._in_reasoning = in_reasoning
        self._events: list[tuple[type, list[str], int, tuple[str, ...]]] = []
        self._source = TextSource()
        self._reread = 0
        self._reading: Generator[None, None, None] | None = self._read()

    def feed(self, text: str, *, final: bool) -> list[ReplyEvent]:
        """Return the events that a piece of the output adds; `final`: it is the last piece."""
        self._source.feed(text, final=final)
        if self._reading is not None:
            try:
                next(self._reading)
            except StopIteration:
                self._reading = None
        events, self._events = self._events, []
        return [_event(*each) for each in events]

    def emit(self, kind: type, text: str, index: int = -1, *more: str) -> None:
        """Add an event, or a text to the last one."""
        if kind in (Reasoning, Content, CallArguments):
            if not text:
                return
            if self._events and self._events[-1][0] is kind and self._events[-1][2] == index:
                self._events[-1][1].append(text)
                return
        self._events.append((kind, [text], index, more))

    def call_id(self, name: str, number: int | None) -> str:
        """Return the id of a new call."""
        if self._format.call_id:
            return self._format.call_id.format(name=name, index=self.num_calls if number is None else number)
        return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))

    def _read(self) -> Reading[None]:
        if self._format.channels is not None:
            yield from self._messages(self._format.channels)
            return
        if self._format.thinking is not None:
            yield from self._thoughts(self._format.thinking)
        if self._format.calls is None or not self.tools:
            yield from self._source.rest(self._say)
        elif self._format.calls.opening or self._format.calls.section_opening:
            yield from self._answer(self._format.calls)
        else:
            yield from self._bare_answer(self._format.calls)

    def _say(self, text: str) -> None:
        self.emit(Content, text)

    def _thoughts(self, thinking: Thinking) -> Reading[None]:
        """Read thoughts, without the spaces around them and after their markers."""
        source, opening, is_open = self._source, words(thinking.opening), self._in_reasoning
        while True:
            if not is_open:
                source.remember()
                try:
                    yield from source.marker(thinking.opening)
                except NoCallError:
                    source.rewind()
                    return
                source.forget()
            elif (yield from source.first_of(opening[:1])):  # it was in the prompt, and comes again
                yield from source.marker(thinking.opening)
            is_open = False
            yield from source.space()
            thought = _Held(lambda text: self.emit(Reasoning, text))
            stop = yield from source.until([thinking.closing.strip()], thought.add)
            if not stop:
                thought.release()
                return
            source.at += len(stop)
            yield from source.space()

    def _answer(self, calls: CallSyntax) -> Reading[None]:
        """Read content, and calls that an opening marks."""
        source = self._source
        opening = words(calls.section_opening or calls.opening)[0]
        while True:
            content = _Held(self._say)
            if not (yield from source.until([opening], content.add)):
                content.release()
                return
            source.remember()
            if (yield from self._calls(calls)):
                source.forget()
                yield from self._after_calls()
                continue
            # it only looked like a call
            content.release()
            again = source.num_kept - len(opening)
            if self._reread + again <= _REREAD_FIRST + _REREAD * source.position:
                self._reread += again
                source.rewind()
                source.at += len(opening)
                self._say(opening)
            else:
                self._say(source.forget())

    def _bare_answer(self, calls: CallSyntax) -> Reading[None]:
        """Read an answer whose calls nothing marks: they are at its beginning."""
        source, found = self._source, True
        while found:
            source.remember()
            found = yield from self._calls(calls)
            if not found:
                source.rewind()
            else:
                source.forget()
                yield from self._after_calls()
        yield from source.rest(self._say)

    def _after_calls(self) -> Reading[None]:
        while (yield from self._source.peek()) in _BETWEEN:
            self._source.at += 1

    def _calls(self, calls: CallSyntax) -> Reading[bool]:
        """Read calls, and return whether there is one; what follows the last one is not read."""
        source, found, call = self._source, False, _Call(self)
        try:
            if calls.optional_opening and (yield from source.first_of([calls.optional_opening])):
                yield from source.marker(calls.optional_opening)
            yield from source.marker(calls.section_opening)
            if calls.is_list:
                yield from source.marker(calls.opening)
                yield from source.marker("[")
            while True:
                call = _Call(self)
                if not calls.is_list:
                    yield from source.marker(calls.opening)
                yield from self._call(calls, call)
                if not calls.is_list and not (yield from source.closes(calls.closing)):
                    raise NoCallError
                call.finish()
                found = True
                source.remember()
                if not (yield from self._another(calls)):
                    return True
        except NoCallError:
            if call.is_open:  # it is constrained, and was cut
                self.is_cut = True
                call.finish()
                source.remember()
                return True
            if found:
                source.rewind()
                source.remember()
            return found

    def _another(self, calls: CallSyntax) -> Reading[bool]:
        """Read what is between two calls; return whether another one follows at once."""
        source = self._source
        if calls.is_list:
            if (yield from source.first_of([","])):
                yield from source.marker(",")
                source.remember()
                return True
            if not (yield from source.closes("]")) or not (yield from source.closes(calls.closing)):
                raise NoCallError
        elif calls.section_opening:
            opening = words(calls.opening)[0]
            if (yield from source.first_of([opening])):
                return True
            if not (yield from source.closes(calls.section_closing)):
                raise NoCallError
        return False

    def _call(self, calls: CallSyntax, call: _Call) -> Reading[None]:
        source, syntax = self._source, calls.call
        if isinstance(syntax, JsonCall):
            yield from self._json_call(call)
            return
        yield from source.marker(syntax.prefix)
        yield from source.space()
        name: list[str] = []
        infix = words(syntax.infix)
        begins = [each for each in (*infix[:1], syntax.id_marker, syntax.number_marker) if each]
        yield from text_of(source, "".join(each[0] for each in begins) or "<", name.append)
        call_id, number = None, None
        if syntax.id_marker and (yield from source.first_of([syntax.id_marker, *infix[:1]])) == syntax.id_marker:
            yield from source.marker(syntax.id_marker)
            found: list[str] = []
            yield from text_of(source, infix[0][0], found.append)
            call_id = "".join(found)
        if syntax.number_marker:
            yield from source.marker(syntax.number_marker)
            digits: list[str] = []
            yield from text_of(source, infix[0][0], digits.append)
            if not "".join(digits).isdecimal():
                raise NoCallError
            number = int("".join(digits))
        yield from source.marker(syntax.infix)
        call.named("".join(name), call_id=call_id, number=number)
        schema = self.tools["".join(name)]
        ending = syntax.suffix or calls.closing
        constrained = self.is_constrained
        yield from read_arguments(source, syntax.arguments, ending, schema, call.argue, is_constrained=constrained)
        if not isinstance(syntax.arguments, LiteralArguments):
            yield from source.marker(syntax.suffix)

    def _json_call(self, call: _Call) -> Reading[None]:
        """Read a call that is a JSON object; its arguments are as they are written."""
        source, is_first = self._source, True
        yield from source.marker("{")
        while not (yield from source.first_of(["}"])):
            if not is_first:
                yield from source.marker(",")
            is_first = False
            key = yield from self._json_text()
            yield from source.marker(":")
            yield from source.space()
            if key == "name":
                call.named((yield from self._json_text()))
            elif key in ("arguments", "parameters"):
                yield from json_value(source, call.argue)
            else:
                yield from json_value(source, lambda text: None)
        yield from source.marker("}")

    def _json_text(self) -> Reading[str]:
        pieces: list[str] = []
        if (yield from self._source.space()) != '"':
            raise NoCallError
        yield from json_value(self._source, pieces.append)
        text = "".join(pieces)
        if not is_json(text):
            raise NoCallError
        return str(json.loads(text))

    def _messages(self, channels: Channels) -> Reading[None]:
        """Read messages that each have a header."""
        source, ends = self._source, [*channels.endings, channels.start, channels.channel]
        begins = [channels.start, channels.channel, channels.recipient.strip(), channels.message]
        was_thought = False
        while (yield from source.peek()):
            channel, recipient = channels.content, ""
            if (yield from source.first_of(begins)):
                header: list[str] = []
                stop = yield from source.until([channels.message, *channels.endings], header.append)
                source.at += len(stop)
                if stop != channels.message:
                    self._say("".join(header))
                    continue
                channel, recipient = _header(channels, "".join(header))
            if recipient in self.tools:
                yield from self._message_call(channels, recipient, ends)
            else:
                kind = Reasoning if channel == channels.reasoning else Content
                if kind is Reasoning and was_thought:
                    self.emit(Reasoning, "\n")
                was_thought |= kind is Reasoning
                yield from source.until(ends, partial(self.emit, kind))
            ending = yield from source.first_of(channels.endings)
            source.at += len(ending)

    def _message_call(self, channels: Channels, name: str, ends: Sequence[str]) -> Reading[None]:
        source, call = self._source, _Call(self)
        pieces: list[str] = []
        try:
            call.named(name)
            if self.is_constrained:
                yield from json_value(source, call.argue)
            else:
                yield from source.until(ends, pieces.append)
                call.argue("".join(pieces).strip())
            call.finish()
        except NoCallError:
            if call.is_open:
                self.is_cut = True
                call.finish()
            else:
                self._say("".join(pieces))


def _header(channels: Channels, header: str) -> tuple[str, str]:
    """Return the channel and the function that a header names."""
    _, _, recipient = header.partition(channels.recipient.strip())
    called = recipient.partition(channels.channel)[0].partition(channels.constrain)[0].split()[:1]
    _, _, channel = header.partition(channels.channel)
    named = channel.partition(channels.constrain)[0].split()[:1]
    return "".join(named) or channels.content, "".join(called)


def _event(kind: type, texts: list[str], index: int, more: tuple[str, ...]) -> Any:
    if kind in (Reasoning, Content):
        return kind("".join(texts))
    if kind is CallArguments:
        return CallArguments(index, "".join(texts))
    return CallEnd(index) if kind is CallEnd else CallStart(index, *more)
