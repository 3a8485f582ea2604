"""The command ``mmrepro VERB``: verbs, help, exit codes."""
import re

import pytest
from command import exit_code

from mmrepro import cli, exit_codes


def test_the_help_names_all_verbs_and_exit_codes_and_unknown_verbs_are_refused(capsys):
    assert cli.main(['--help']) == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in cli.VERBS) and len(cli.VERBS) <= 12
    assert all(f'{code:>3}  {text}' in out for code, text in exit_codes.MEANINGS.items())
    assert cli.main(['trian']) == 2
    assert capsys.readouterr().err == (
        "mmrepro: unknown verb 'trian'; did you mean 'train'? (see mmrepro --help)\n")
    assert cli.main(['nothing-like-it']) == 2
    assert 'verbs: demo, train, test' in capsys.readouterr().err
    assert cli.main([]) == 2
    assert 'usage: mmrepro VERB' in capsys.readouterr().err


def test_an_earlier_name_works_and_says_the_present_one(capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(['gpu-check', '--help'])
    said = capsys.readouterr()
    assert error.value.code == 0 and 'usage: mmrepro doctor' in said.out
    assert said.err == 'mmrepro gpu-check is now: mmrepro doctor --gpu\n'


@pytest.mark.parametrize('given, verb, arguments', [
    ('data OUT --seed 3', 'demo', '--data-only OUT --seed 3'),
    ('chaos C --seed 3', 'verify', '--vary kills C --kill-seed 3'),
    ('state C --at 1', 'verify', '--vary resume --localise C --at 1'),
    ('ops --device cpu', 'doctor', '--operators --device cpu')])
def test_the_arguments_of_an_earlier_name_are_translated(given, verb, arguments, monkeypatch):
    seen = []
    monkeypatch.setattr(cli, 'run', lambda *words: seen.append(words) or 0)
    assert cli.main(given.split()) == 0
    assert seen == [(verb, arguments.split())] and not set(cli.VERBS) & set(cli.RENAMED)


@pytest.mark.parametrize('verb, said', [
    ('verify', 'mmrepro verify: interrupted'),
    ('seeds', 'mmrepro seeds: interrupted; the same command continues'),
    ('train', 'mmrepro train: interrupted; the same command with --resume continues from the '
     'latest checkpoint')])
def test_an_interrupted_verb_says_one_line(verb, said, monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, 'load', lambda name: interrupted)
    assert cli.main([verb, 'CONFIG']) == exit_codes.INTERRUPTED == 130
    assert capsys.readouterr().err == f'\n{said}\n'


@pytest.mark.parametrize('verb', cli.VERBS)
def test_every_verb_has_help_with_an_example_and_wrong_usage_is_one_line(verb, capsys):
    assert exit_code(verb, '--help') == 0
    out = capsys.readouterr().out
    assert re.search(rf'examples?:\n  mmrepro {verb}', out) and '==SUPPRESS==' not in out
    assert not re.search(r'--?\w+-$', out, re.M)  # an option is in one piece
    assert exit_code(verb, '--no-such-option') == exit_codes.USAGE
    said = capsys.readouterr().err
    assert said.startswith(f'mmrepro {verb}: ') and said.count('\n') == 1
    assert said.endswith(f'(see mmrepro {verb} --help)\n')


def test_a_signal_is_named():
    assert exit_codes.meaning(-15) == 'killed by SIGTERM'
    assert exit_codes.meaning(77) == 'unknown'
