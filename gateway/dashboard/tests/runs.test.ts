import { afterEach, describe, expect, it, vi } from 'vitest';

import { FilterError, parseFilter } from '../src/lib/runfilter';
import { defaultColumns, figuresOf, groupRuns, linesOf, sortRuns, titleOf, trouble } from '../src/lib/runtable';
import { keysOf, unknownKeys } from '../src/lib/runvalues';
import { sparkPath } from '../src/lib/sparkpath';
import type { Run } from '../src/lib/types';
import { run } from './objects';

const sft = run('sft-1', {
  state: 'completed',
  tags: ['best', 'kept'],
  config: { learning_rate: 0.001, 'optim/decay': 0.1, 'a.b': 'x "y"', optimizer: 'adamw' },
  summary: { loss: [0.2, 0.1, 2, 99], 'eval/acc': [0.9, 0.1, 0.95, 99] },
  began: Date.parse('2026-05-01') / 1000,
});
const bad = run('pre-2', { state: 'crashed', config: { learning_rate: 0.1, optimizer: 'sgd' }, summary: { loss: ['NaN', 0.5, 3, 40] } });
const young = run('young', { state: 'running' });
const all = [sft, bad, young];

const found = (text: string, runs: readonly Run[] = all): string[] => runs.filter((one) => parseFilter(text).matches(one)).map((one) => one.name);

describe('a filter', () => {
  it.each([
    ['', ['sft-1', 'pre-2', 'young']],
    ['SFT', ['sft-1']],
    ['best', ['sft-1']],
    ['*-[0-9]', ['sft-1', 'pre-2']],
    ['loss < 0.3 and learning_rate >= 1e-4 and state == "completed" and tag == "best"', ['sft-1']],
    ['loss<0.3', ['sft-1']],
    ['loss < 0.3 or state == "crashed"', ['sft-1', 'pre-2']],
    ['not state == "completed"', ['pre-2', 'young']],
    ['state != "completed" and not (loss == nan)', ['young']],
    ['loss == none', ['young']],
    ['loss != none', ['sft-1', 'pre-2']],
    ['`optim/decay` == 0.1', ['sft-1']],
    ['"optim/decay" == 0.1', ['sft-1']],
    ['optim/decay == 0.1', ['sft-1']],
    ["'a.b' == 'x \"y\"'", ['sft-1']],
    ['"a.b" == "x \\"y\\""', ['sft-1']],
    ['name ~ "pre*"', ['pre-2']],
    ['tag ~ "k?pt"', ['sft-1']],
    ['tag != "best"', ['pre-2', 'young']],
    ['tag == none', ['pre-2', 'young']],
    ['min.loss <= 0.1', ['sft-1']],
    ['summary.loss < 0.3', ['sft-1']],
    ['config.learning_rate > 5e-2', ['pre-2']],
    ['max.eval/acc > 0.94', ['sft-1']],
    ['optimizer >= "b"', ['pre-2']],
    ['loss < "0.3"', []],
    ['loss > -1 and loss < inf', ['sft-1']],
    ['began < "2026-06-01" and began > "2026-04-01"', ['sft-1']],
    ['clean == false', []],
    ['nothing == 1', []],
    ['LOSS < 1', []],
    ['loss < 1_000', ['sft-1']],
    ['loss < 1 AND tag == "kept"', ['sft-1']],
  ])('%s finds %o', (text, names) => {
    expect(found(text)).toEqual(names);
  });

  it('does not tell a metric from a key of the configuration by chance: the configuration comes first, if it is comparable', () => {
    const one = run('both', { config: { loss: 'mse', rate: 3 }, summary: { loss: [0.5, 0.5, 0.5, 1], rate: [9, 9, 9, 1] } });
    expect(found('loss < 1', [one])).toEqual(['both']);
    expect(found('loss == "mse"', [one])).toEqual(['both']);
    expect(found('rate == 3', [one])).toEqual(['both']);
    expect(found('summary.rate == 9', [one])).toEqual(['both']);
  });

  it.each([
    ['loss <', 6, 'the end: a value is expected'],
    ['loss < 0.3 and', 14, 'the end: a key is expected'],
    ['loss = 0.3', 5, '= is no operator: write =='],
    ['loss < 0.3 && tag == "a"', 11, '& is no operator: write and'],
    ['state == completed', 9, 'completed is no value: write texts in quotes, "completed"'],
    ['state == "completed', 9, 'the quote " is not closed'],
    ['(loss < 1', 0, 'the bracket is not closed'],
    ['loss < 1)', 8, ') is not expected here'],
    ['loss < 1 tag == "a"', 9, 'tag is not expected here: join comparisons with and, or'],
    ['loss 3 < 4', 5, '3: a comparison is expected after loss'],
    ['3 < loss', 0, '3: a key is expected'],
    ['loss < none', 5, '< compares numbers and texts'],
    ['loss ~ 3', 5, '~ compares with a glob'],
    ['loss < 1 # x', 9, '# is not expected here'],
    [`${'('.repeat(200)}loss < 1`, 100, 'more than 100'],
  ])('%s is refused at character %d: %s', (text, at, message) => {
    expect(() => parseFilter(text)).toThrow(FilterError);
    try {
      parseFilter(text);
    } catch (error) {
      expect((error as FilterError).message).toContain(message);
      expect((error as FilterError).at).toBe(at);
    }
  });

  it('names the keys that no run has', () => {
    const { keys } = parseFilter('los < 1 and `optim/decay` == 1 and state == "x" and min.loss < 2 and tag == "a"');
    expect(unknownKeys(keys, keysOf(all))).toEqual(['los']);
  });

  it('reads no property of objects', () => {
    expect(found('constructor != none or __proto__ != none or toString ~ "*"')).toEqual([]);
  });
});

describe('the table of runs', () => {
  const now = 0;

  it('orders by any column, and runs without a value come last', () => {
    const order = (sort: string): string[] => sortRuns(all, sort, now).map((one) => one.name);
    expect(order('config.learning_rate')).toEqual(['sft-1', 'pre-2', 'young']);
    expect(order('-config.learning_rate')).toEqual(['pre-2', 'sft-1', 'young']);
    expect(order('summary.loss')).toEqual(['sft-1', 'pre-2', 'young']); // not a number is no value
    expect(order('-name')).toEqual(['young', 'sft-1', 'pre-2']);
    expect(order('-config.optimizer')).toEqual(['pre-2', 'sft-1', 'young']);
  });

  it('groups by a key, with the mean and the best of each group', () => {
    const runs = [1, 2, 3].map((at) => run(`r${at}`, { config: { opt: at < 3 ? 'a' : 'b' }, summary: { loss: [at, at / 2, 9, 5], acc: [at, 0, 9, 5] } }));
    const groups = groupRuns(runs, 'config.opt', now);
    expect(groups.map((one) => [one.value, one.runs.length])).toEqual([['a', 2], ['b', 1]]);
    expect(figuresOf(groups[0]!.runs, 'summary.loss', now)).toEqual({ mean: 1.5, best: 1 });
    expect(figuresOf(groups[0]!.runs, 'summary.acc', now)).toEqual({ mean: 1.5, best: 2 });
    expect(figuresOf([bad], 'summary.loss', now)).toEqual({ mean: null, best: null });
    expect(groupRuns(all, 'config.optimizer', now).map((one) => one.value)).toEqual(['adamw', 'sgd', 'none']);
  });

  it('has the runs of a group below it while it is open', () => {
    const names = (open: string[]): string[] => linesOf(all, 'state', new Set(open), now).map((one) => (one.group ? `+${one.group.value}` : one.run.name));
    expect(names([])).toEqual(['+completed', '+crashed', '+running']);
    expect(names(['crashed'])).toEqual(['+completed', '+crashed', 'pre-2', '+running']);
  });

  it('shows the loss and what differs between the configurations, unless columns are chosen', () => {
    const columns = defaultColumns([sft, bad]);
    expect(columns).toContain('summary.loss');
    expect(columns).toContain('config.learning_rate');
    expect(defaultColumns([sft])).not.toContain('config.learning_rate');
    expect(defaultColumns([])).toEqual(['state', 'began', 'took', 'step']);
    expect(columns.map(titleOf)).toContain('loss (min)');
  });
});

describe('a run that somebody should look at', () => {
  it.each([
    [bad, 'crashed'],
    [sft, undefined],
    [run('r', { summary: { loss: ['Infinity', 1, 2, 9] } }), 'diverged'],
    [run('r', { summary: { loss: [1.9, 0.3, 2, 400] } }), 'diverged'],
    [run('r', { summary: { loss: [0.4, 0.3, 2, 400] } }), undefined],
    [run('r', { summary: { loss: [1.9, 0.3, 2, 4] } }), undefined], // it has just begun
    [run('r', { state: 'completed', summary: { loss: ['NaN', 1, 2, 9] } }), undefined],
    [run('r', { ranks: 4, replicas: { running: 3, stalled: 1 } }), 'stalled'],
    [run('r', { ranks: 2, replicas: { recovering: 2 } }), 'not connected'],
  ] as [Run, string | undefined][])('%#: %o', (one, what) => {
    expect(trouble(one)?.what).toBe(what);
  });
});

describe('a small curve', () => {
  const section = (value: (number | null)[], from = 0): { time: number[]; step: number[]; value: (number | null)[]; low: number[]; high: number[] } => ({
    time: value.map((_, at) => from + at),
    step: value.map((_, at) => from + at),
    value,
    low: [],
    high: [],
  });

  it('has a gap between its sections', () => {
    expect(sparkPath([section([0, 1]), section([1, 0], 3)], 34, 24)).toBe('M2.0 22.0L9.5 2.0M24.5 2.0L32.0 22.0');
  });

  it('is nothing with less than two points', () => {
    expect(sparkPath([section([1, null])], 30, 20)).toBe('');
    expect(sparkPath([], 30, 20)).toBe('');
  });
});

describe('the small curve of a living run', () => {
  afterEach(() => {
    vi.useRealTimers();
    vi.unstubAllGlobals();
  });

  it('goes on with what the list of runs tells, and is loaded again after a while, one of many at a time', async () => {
    vi.useFakeTimers();
    const asked: string[] = [];
    vi.stubGlobal('fetch', (url: URL) => {
      asked.push(url.pathname);
      const section = { time: [1, 2], step: [1, 2], value: [3, 2], low: [3, 2], high: [3, 2] };
      return Promise.resolve(new Response(JSON.stringify({ curves: [{ replica: null, sections: [section] }] })));
    });
    const { sparks } = await import('../src/lib/sparks.svelte');
    const want = (step: number): void => {
      for (const name of ['a', 'b', 'c']) sparks.want(run(name, { state: 'running', step, summary: { loss: [1.5, 1, 3, 99] } }));
    };
    const stepsOf = (name: string): unknown => sparks.of(`id-${name}`).sections?.at(-1)?.step;
    want(2);
    await vi.advanceTimersByTimeAsync(200);
    expect(asked).toHaveLength(3);
    want(9);
    want(9);
    want(4); // it began again
    expect(stepsOf('a')).toEqual([1, 2, 9]);
    expect(sparks.of('id-a').sections!.at(-1)!.value).toEqual([3, 2, 1.5]);
    await vi.advanceTimersByTimeAsync(60_000);
    expect(asked).toHaveLength(3);
    want(10);
    for (const loaded of [4, 5, 6]) {
      await vi.advanceTimersByTimeAsync(2500);
      expect(asked).toHaveLength(loaded);
    }
    await vi.advanceTimersByTimeAsync(2500);
    expect(stepsOf('c')).toEqual([1, 2]);
  });
});
