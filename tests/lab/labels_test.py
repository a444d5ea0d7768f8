"""Labels of components: what is asked, what an endpoint answers, and how well labels predict."""

import contextlib
import http.server
import json
import threading
import time

import numpy as np
import pytest
from tiny_run import BYTES

from valkyrie.errors import DataError, UsageError
from valkyrie.lab.decomposition import ask, exchange, label_scores, labels
from valkyrie.lab.decomposition.endpoint import KEY, URL, Endpoint, Failed
from valkyrie.lab.decomposition.shown import Component, ShownSite, Token, Window

SECRET = 'sk-local-0123456789'
THRESHOLD = 0.5
LETTERS = 'abcd'  # component n is active at the letter n


def window(text, letter):
  """A window of a component that is active at a letter, and is chosen for its last place."""
  ids = np.asarray(BYTES.encode(text))
  importances = np.array([0.9 if character == letter else 0.1 for character in text])
  return Window(ids, importances, max(text.rfind(letter), 0))


def sites():
  """Two sites of two components, one for each letter."""
  components = []
  for number, letter in enumerate(LETTERS):
    held_out = [window(f'{letter}x{n}', letter) for n in 'ef']
    held_out += [window(f'y{n}zz', letter) for n in 'ef']
    shown = [window(f'k{letter}{letter}l\n', letter), window(f'm{letter}', letter)]
    token = Token(2.0, 0.75, BYTES.encode(letter)[0])
    components.append(Component(number % 2, 0.1, 0.02, shown, [token], [], held_out))
  pairs = components[:2], components[2:]
  means = np.array([0.1, 0.1])
  return [ShownSite(f'layers.{n}.mlp.out', 2, 0.04, means, pair) for n, pair in enumerate(pairs)]


@pytest.fixture
def folder(tmp_path):
  """A folder of labels for four components."""
  written = labels.write(tmp_path, sites(), BYTES.decode, THRESHOLD)
  assert len(written) == 4 and written == labels.described(tmp_path)
  return tmp_path


@contextlib.contextmanager
def server(behave):
  """An endpoint on this machine; yields its address and the requests so far.

  behave: (body of a request) -> the text of the answer, or a function that writes to the handler.
  """
  seen = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
      seen.append((self.path, self.headers.get('Authorization'), body))
      answer = behave(body)
      with contextlib.suppress(OSError):  # who does not wait for it
        if callable(answer):
          answer(self)
        else:
          send(self, 200, completion(answer))

    def log_message(self, *_):
      pass

  made = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  made.daemon_threads = True
  threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
  try:
    yield f'http://127.0.0.1:{made.server_port}/v1', seen
  finally:
    made.shutdown()
    made.server_close()


def completion(text, finish='stop'):
  choice = {'message': {'role': 'assistant', 'content': text}, 'finish_reason': finish}
  return {'choices': [choice], 'usage': {'prompt_tokens': 100, 'completion_tokens': 10}}


def send(handler, status, body, **headers):
  content = body if isinstance(body, bytes) else json.dumps(body).encode()
  handler.send_response(status)
  handler.send_header('Content-Length', str(len(content)))
  for name, value in headers.items():
    handler.send_header(name.replace('_', '-'), value)
  handler.end_headers()
  handler.wfile.write(content)


@pytest.fixture
def environment(monkeypatch):
  """Sets the address and the key of the endpoint."""
  monkeypatch.setenv('no_proxy', '127.0.0.1')

  def set_both(url, key=SECRET):
    monkeypatch.setenv(URL, url)
    monkeypatch.setenv(KEY, key)

  return set_both


def user_text(body):
  return body['messages'][1]['content']


def name_letter(body):
  """Labels a component by the letter in the first marks."""
  return user_text(body).partition('<<')[2][0]


def judge(body):
  """Names the passages that have the letter of the description."""
  description, *passages = user_text(body).split('\n')
  letter = json.loads(description.partition(': ')[2])
  named = [n for n, text in enumerate(passages, 1) if letter in text.partition(': ')[2]]
  return f'```json\n{json.dumps(named)}\n```'


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def labels_in(folder):
  return exchange.read_answers(folder / labels.LABELS)


def test_a_prompt_has_marked_passages_and_telling_tokens_and_nothing_that_is_held_out(folder):
  asked = exchange.read_requests(folder / labels.PROMPTS)
  first = asked[0].messages[1]['content'].split('\n')
  assert first == [
    'The part is active at 2.00% of tokens.',
    'Tokens at which it is active: "a" (75%)',
    r'Passage 1: "k<<aa>>l\n"',
    'Passage 2: "m<<a>>"',
  ]
  assert [request.id.rpartition('/')[0] for request in asked] == [
    f'layers.{n // 2}.mlp.out/{n % 2}' for n in range(4)
  ]
  components = labels.described(folder)
  assert [component.id for component in components] == [request.id for request in asked]
  for component, letter in zip(components, LETTERS, strict=True):
    assert sorted(component.held_out) == [
      (f'{letter}xe', True, True),
      (f'{letter}xf', True, True),
      ('yezz', False, False),
      ('yfzz', False, False),
    ]
  prompts = (folder / labels.PROMPTS).read_text()
  assert 'axe' not in prompts and 'yezz' not in prompts
  (folder / labels.LABELS).write_bytes(exchange.line_of({'id': asked[0].id, 'answer': 'x'}))
  assert set(labels.by_place(components, labels_in(folder))) == {('layers.0.mlp.out', 0)}
  other = sites()
  other[0].components[0].windows[1].ids[0] += 1
  labels.write(folder, other, BYTES.decode, THRESHOLD)
  found = labels.of_answers(labels.described(folder), labels_in(folder))
  assert not found.by_id and found.strange == 1  # it answered another prompt


def test_labels_are_asked_for_scored_and_shown(folder, environment, capsys):
  files = [str(folder / name) for name in (labels.PROMPTS, labels.LABELS)]
  with server(name_letter) as (url, seen):
    environment(url)
    assert ask.main([*files, '--model', 'small']) == 0
    said = capsys.readouterr().out
    size = sum(request.size for request in exchange.read_requests(folder / labels.PROMPTS))
    assert '4 of 4 requests have no answer' in said and 'Nothing was sent. Add --send' in said
    assert f'about {size // 4:,} tokens' in said and 'at most 1,200 tokens' in said
    assert not seen and not (folder / labels.LABELS).exists()
    assert ask.main([*files, '--model', 'small', '--send']) == 0
    said = capsys.readouterr().out
    assert (
      f'They go to {url}.' in said and f'{url} answered 4 of 4 requests. It counted 400' in said
    )
    assert {path for path, _, _ in seen} == {'/v1/chat/completions'}
    assert {key for _, key, _ in seen} == {f'Bearer {SECRET}'}
    assert all(body['model'] == 'small' and body['max_tokens'] == 300 for _, _, body in seen)
    assert ask.main([*files, '--model', 'small', '--send']) == 0  # all have answers
    assert len(seen) == 4

  assert label_scores.main([str(folder)]) == 0
  said = capsys.readouterr().out
  assert '4 of 4 components have labels.' in said and '8 questions about 4 components' in said
  assert 'There are no scores yet' in said
  asked = (folder / label_scores.QUESTIONS).read_text()
  assert 'active": ' not in asked and '<<' not in asked.replace(label_scores._SYSTEM, '')

  files = [str(folder / name) for name in (label_scores.QUESTIONS, label_scores.ANSWERS)]
  with server(judge) as (url, _):
    environment(url)
    assert ask.main([*files, '--model', 'small', '--send', '--at_once', '1']) == 0
  capsys.readouterr()
  assert label_scores.main([str(folder)]) == 0
  table = capsys.readouterr().out.splitlines()[-4:]
  names_and_means = [line.split()[:2] for line in table]
  # Another component's letter is in none of the passages: the judge says that none is active.
  assert names_and_means == [
    ['own', '100.0%'],
    ['shuffled', '50.0%'],
    ['tokens', '100.0%'],
    ['constant', '50.0%'],
  ]
  scores = lines(folder / label_scores.SCORES)
  assert [score['label'] for score in scores] == [*LETTERS]
  assert {(score['passages'], score['own'], score['shuffled']) for score in scores} == {(4, 1, 0.5)}
  labeled = labels.with_labels(
    sites(), labels.by_place(labels.described(folder), labels_in(folder))
  )
  assert [component.label for site in labeled for component in site.components] == [*LETTERS]
  for path in folder.iterdir():
    assert SECRET not in path.read_text()


def test_what_stops_at_a_request_or_ends_early_continues_without_sending_anything_twice(
  folder, environment, capsys
):
  """One prompt is refused, then another server goes down: the third run has what is missing."""
  files = [str(folder / name) for name in (labels.PROMPTS, labels.LABELS)]
  flags = ['--model', 'small', '--send', '--at_once', '1', '--attempts', '2']

  def refuse_b(body):
    if name_letter(body) == 'b':
      return lambda handler: send(handler, 400, {'error': {'message': f'too long for {SECRET}'}})
    return name_letter(body)

  with server(refuse_b) as (url, seen):
    environment(url)
    assert ask.main([*files, *flags]) == 75
    said = capsys.readouterr()
    assert 'answered 3 of 4 requests' in said.err and 'layers.0.mlp.out/1/' in said.err
    assert f'status 400: {{"error": {{"message": "too long for ${KEY}"' in said.err
    assert SECRET not in said.err + said.out
    assert len(seen) == 4
  with server(name_letter) as (url, seen):
    path = folder / labels.LABELS
    path.write_bytes(path.read_bytes()[:-1])  # another program's last line
    environment(url)
    assert ask.main([*files, *flags]) == 0
    assert [name_letter(body) for _, _, body in seen] == ['b']
  assert len(lines(path)) == 4
  path.write_bytes(path.read_bytes()[:-3])
  assert ask.main([*files, *flags]) == 65
  assert 'labels.jsonl, line 4, cannot be used' in capsys.readouterr().err


def endpoint(url, attempts=3, timeout=5.0, key=SECRET):
  """(an endpoint, the seconds for which it was to wait)."""
  waits = []

  def wait(seconds):
    waits.append(seconds)
    return len(waits) > 5

  environment = {URL: url, KEY: key}
  made = Endpoint(
    {'model': 'm'}, timeout=timeout, attempts=attempts, wait=wait, environment=environment
  )
  return made, waits


REQUEST = exchange.request('a/1', 'system', 'user')


def cut_connection(handler):
  handler.send_response(200)
  handler.send_header('Content-Length', '1000')
  handler.end_headers()
  handler.wfile.write(b'{"choices": [')


PASSING = {
  'busy': (lambda h: send(h, 429, b'wait', Retry_After='7'), 7.0),
  'until': (lambda h: send(h, 429, b'', Retry_After='Wed, 21 Oct 2150 07:28:00 GMT'), 60.0),
  'past': (lambda h: send(h, 429, b'', Retry_After='Wed, 21 Oct 2015 07:28:00 GMT'), 0.0),
  'when': (lambda h: send(h, 429, b'', Retry_After='soon'), 1.0),
  'down': (lambda h: send(h, 503, b'<html>'), 1.0),
  'cut': (cut_connection, 1.0),
  'page': (lambda h: send(h, 200, b'<html>Welcome</html>'), 1.0),
  'empty': (lambda h: send(h, 200, {'choices': []}), 1.0),
  'slow': (lambda h: time.sleep(0.3), 1.0),
}


@pytest.mark.parametrize('name', PASSING)
def test_another_attempt_follows_what_passes(environment, name):
  environment('')
  fails, seconds = PASSING[name]
  count = iter(range(9))
  with server(lambda body: 'yes' if next(count) else fails) as (url, seen):
    made, waits = endpoint(url, timeout=0.2 if name == 'slow' else 5.0)
    answer = made.answer(REQUEST)
    assert answer == ('yes', 100, 10) and waits == [seconds] and len(seen) == 2


def test_attempts_are_limited_and_end_when_they_are_to_stop(environment):
  environment('')
  with server(lambda body: lambda h: send(h, 500, b'no')) as (url, seen):
    made, waits = endpoint(url)
    with pytest.raises(Failed, match=r'status 500: no \(attempts: 3\)'):
      made.answer(REQUEST)
    assert waits == [1, 2] and len(seen) == 3
    made, _ = endpoint('http://a..b/v1', attempts=1)  # a host's name that cannot be encoded
    with pytest.raises(Failed, match='attempts: 1'):
      made.answer(REQUEST)
    made, _ = endpoint(url, attempts=100)
    with pytest.raises(Failed, match='it was stopped'):
      made.answer(REQUEST)
  said = {'error': {'message': f'no such model for {SECRET}'}}
  with server(lambda body: lambda h: send(h, 200, said)) as (url, _):
    made, _ = endpoint(url, attempts=1)
    message = rf'is not a completion: {{"error": {{"message": "no such model for \${KEY}"}}}} \('
    with pytest.raises(Failed, match=message):
      made.answer(REQUEST)


LASTING = {
  'cut': (lambda h: send(h, 200, completion('a', 'length')), 'cut at the limit', False),
  'none': (lambda h: send(h, 200, completion(None)), 'is not a text', False),
  'key': (lambda h: send(h, 401, {'key': SECRET}), rf'status 401: {{"key": "\${KEY}"}}', True),
  'moved': (
    lambda h: send(h, 307, b'', Location=f'{h.path}2'),
    'status 307: Temporary Redirect',
    True,
  ),
  'found': (lambda h: send(h, 302, b'', Location=f'{h.path}2'), 'status 302', True),
}


@pytest.mark.parametrize('name', LASTING)
def test_no_attempt_follows_what_lasts(environment, name):
  environment('')
  behave, message, ends = LASTING[name]
  with server(lambda body: behave) as (url, seen):
    made, waits = endpoint(url)
    with pytest.raises(Failed, match=message) as caught:
      made.answer(REQUEST)
    assert caught.value.ends == ends and not waits and len(seen) == 1
    assert SECRET not in str(caught.value)


def test_a_wrong_key_ends_at_once_and_so_does_an_endpoint_that_fails_always(
  tmp_path, environment, capsys
):
  asked = [exchange.request(f'a/{n}', 'system', 'user')._asdict() for n in range(9)]
  exchange.write_lines(tmp_path / 'asked.jsonl', asked)
  files = [str(tmp_path / name) for name in ('asked.jsonl', 'answers.jsonl')]
  flags = ['--model', 'm', '--send', '--at_once', '1', '--attempts', '1']
  for status, count in ((401, 1), (500, 5)):
    failing = status
    with server(lambda body, failing=failing: lambda h: send(h, failing, b'no')) as (url, seen):
      environment(url)
      assert ask.main([*files, *flags]) == 75
      assert count <= len(seen) <= count + 1  # one may have been under way
    assert f'status {status}: no' in capsys.readouterr().err


@pytest.mark.parametrize('fields', ['{"model": "other"}', '{"max_tokens": 1, "messages": []}'])
def test_a_field_that_requests_have_already_is_refused(folder, capsys, fields):
  files = [str(folder / name) for name in (labels.PROMPTS, labels.LABELS)]
  assert ask.main([*files, '--model', 'small', '--fields', fields]) == 2
  said = capsys.readouterr().err
  name = next(name for name in ('model', 'messages') if name in fields)
  assert f"--fields has '{name}': " in said and 'Leave it out' in said


@pytest.mark.parametrize(
  ('url', 'key', 'message'),
  [
    ('', SECRET, f'{URL} is not set'),
    ('localhost:8000/v1', SECRET, 'not an address that begins'),
    ('file:///etc/passwd', SECRET, 'not an address that begins'),
    (f'http://user:{SECRET}@127.0.0.1/v1', SECRET, 'more than a host'),
    (f'http://127.0.0.1/v1?key={SECRET}', SECRET, 'more than a host'),
    ('http://127.0.0.1/v1', f'{SECRET}\nX: y', f'{KEY} has a blank'),
    ('http://127.0.0.1/v1', f'{SECRET}é', f'{KEY} has a blank'),
  ],
)
def test_a_wrong_environment_is_named_without_what_is_secret(url, key, message):
  with pytest.raises(UsageError, match=message) as caught:
    endpoint(url, key=key)
  assert SECRET not in str(caught.value)


def test_answers_of_strangers_are_text_and_no_more(folder):
  components = labels.described(folder)
  first, second, third, fourth = (component.id for component in components)
  answers = {
    first: ' two\n lines \u202e<b> ',
    second: ' \n',
    third: 'x' * 301,
    fourth: '../../etc/passwd',
    'others': 'y',
  }
  exchange.write_lines(
    folder / labels.LABELS, ({'id': name, 'answer': text} for name, text in answers.items())
  )
  found = labels.of_answers(components, labels_in(folder))
  assert found.by_id == {first: 'two lines \\u202e<b>', fourth: '../../etc/passwd'}
  assert found.refused == {
    second: 'it is empty',
    third: 'it has 301 characters, expected at most 300',
  }
  assert found.strange == 1
  labeled = labels.with_labels(sites(), labels.by_place(components, labels_in(folder)))
  assert labeled[0].components[0].label == 'two lines \\u202e<b>'
  for line, message in (
    (b'{"id": "a", "answer": 3}', "line 1, cannot be used: its field 'answer' has 3"),
    (b'{"answer": "b"}', "its field 'id'"),
    (b'[' * 200, 'brackets'),
    (exchange.line_of({'id': 'a', 'answer': 'x' * 100_001}), '100,001 characters'),
  ):
    (folder / labels.LABELS).write_bytes(line)
    with pytest.raises(DataError, match=message):
      labels_in(folder)


@pytest.mark.parametrize('name', [labels.COMPONENTS, labels.PROMPTS, labels.LABELS])
def test_an_id_that_two_lines_have_is_refused(folder, name):
  ids = [component.id for component in labels.described(folder)]
  exchange.write_lines(folder / labels.LABELS, ({'id': each, 'answer': 'x'} for each in ids))
  first, *_ = (folder / name).read_bytes().splitlines(keepends=True)
  (folder / name).write_bytes((folder / name).read_bytes() + first)
  readers = {
    labels.COMPONENTS: lambda: labels.described(folder),
    labels.PROMPTS: lambda: exchange.read_requests(folder / name),
    labels.LABELS: lambda: labels_in(folder),
  }
  with pytest.raises(DataError, match=rf"{name}, line 5, .*: line 1 has the id '{ids[0]}', too"):
    readers[name]()


def test_a_line_that_is_too_long_is_refused(tmp_path):
  path = tmp_path / 'answers.jsonl'
  path.write_bytes(b'{"id": "a", "answer": "b"}\n' + b'x' * (2**24 + 1))
  with pytest.raises(DataError, match=r'answers\.jsonl cannot be read \(.* more than 16,777,216'):
    exchange.read_answers(path)


def test_an_answer_of_the_judge_is_one_list_of_passages():
  for answer, numbers in (
    ('[2, 4]', [2, 4]),
    ('[]', []),
    ('The passages are:\n```json\n[1]\n```', [1]),
  ):
    found = label_scores.judged(answer, 4)
    assert (np.flatnonzero(found) + 1).tolist() == numbers
  for answer in ('', '[5]', '[0]', '[1, 1]', '[1', '[1] or [2]', '[true]', '["1"]', '[1,]', '[01]'):
    assert label_scores.judged(answer, 4) is None


def test_scores_stand_for_what_was_answered_only(folder, capsys):
  """Three labels: a question without an answer, an unclear answer, and nothing to ask about."""
  changed = sites()
  changed[1].components[1] = changed[1].components[1]._replace(held_out=[])
  labels.write(folder, changed, BYTES.decode, THRESHOLD)
  components = labels.described(folder)
  by_id = {components[1].id: 'b', components[2].id: 'c', components[3].id: 'd'}
  asked = label_scores.questions(components, by_id)
  own, other = asked[components[1].id]
  assert 'Description: "b"' in own.messages[1]['content']
  assert other.messages[1]['content'].split('\n')[0] in ('Description: "c"', 'Description: "d"')
  truth = [passage.active for passage in components[1].held_out]
  wrong = [n for n, active in enumerate(truth, 1) if not active]
  answers = {own.id: str(wrong), asked[components[2].id][0].id: 'none of them'}
  first, second, third = label_scores.scored(components, by_id, asked, answers)
  assert first == ('layers.0.mlp.out', 1, 'b', 4, 0.0, None, 1.0, 0.5)
  assert second[4:] == (None, None, 1.0, 0.5) and third[3:] == (0, None, None, None, None)
  alone = label_scores.questions(components, {components[0].id: 'a'})
  assert len(alone[components[0].id]) == 1
  exchange.write_lines(
    folder / labels.LABELS, ({'id': name, 'answer': text} for name, text in by_id.items())
  )
  exchange.write_lines(
    folder / label_scores.ANSWERS, ({'id': name, 'answer': text} for name, text in answers.items())
  )
  assert label_scores.main([str(folder)]) == 0
  said = capsys.readouterr().out
  assert '3 of 4 components have labels.' in said and 'answers 2 of them' in said
  assert 'active in all held-out passages or in none: 1.' in said
  assert 'Answers that are no list of passages: 1 (layers.1.mlp.out/0/own/' in said
  assert 'There are no scores yet' in said
  assert label_scores.main([str(folder / 'missing')]) == 65
