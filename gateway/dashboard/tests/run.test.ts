import { describe, expect, it } from 'vitest';

import { parseMarkdown, parseSpans } from '../src/lib/markdown';
import { branchCommand, causeOf, configAfter, costOf, gpusOf, leftAt, meanRate, reportedFigures } from '../src/lib/runfacts';
import { acknowledgementOf, chiefOf, flagsOf, placeMarks, titleOf, toneOf, within } from '../src/lib/runmarks';
import {
  countedOf,
  countName,
  domainOf,
  extentOf,
  formatPinned,
  formatZoom,
  interpolate,
  linesOf,
  parsePinned,
  parseZoom,
  readingsAt,
  smooth,
  stepAt,
  withLive,
} from '../src/lib/sections';
import { keptParts, steady } from '../src/lib/sets';
import type { CurveSection, RunDetails, RunMark } from '../src/lib/types';
import { meaningOf, sliderPlace, sliderValue } from '../src/lib/values';

/** A section with a point a second. */
function section(begin: number, steps: (number | null)[], values: (number | null)[], spread = 0): CurveSection {
  return {
    time: steps.map((_, at) => begin + at),
    step: steps,
    value: values,
    low: values.map((one) => one && one - spread),
    high: values.map((one) => one && one + spread),
  };
}

const points = (times: number[], values: number[]) => ({ times: Float64Array.from(times), values: Float64Array.from(values) });

describe('what is loaded again', () => {
  it('has the parts that are as they were, as the same objects', () => {
    const known = { timeline: [{ time: 1 }], members: [{ step: 1 }], step: 1 };
    const made = keptParts(known, { timeline: [{ time: 1 }], members: [{ step: 2 }], step: 2 });
    expect(made).toEqual({ timeline: [{ time: 1 }], members: [{ step: 2 }], step: 2 });
    expect(made.timeline).toBe(known.timeline);
    expect(keptParts(null, known)).toBe(known);
  });

  it('is the same list as long as it has the same things', () => {
    const same = steady<string>();
    const first = same(['a', 'b']);
    expect(same(['a', 'b'])).toBe(first);
    expect(same(['b'])).toEqual(['b']);
  });
});

describe('sections of a run', () => {
  it('are lines over steps, in which what was made again is told apart', () => {
    const [before, after] = linesOf('r', [section(0, [0, 1, 2, 3], [4, 3, 2, 1]), section(10, [2, 3, 4], [2, 1, 0.5])], 'step', null, 0);
    expect([...before!.x]).toEqual([0, 1, 2, 3]);
    expect(before!.again).toBe(2);
    expect(after!.again).toBe(3);
  });

  it('of a restart that made nothing again are whole', () => {
    const [before] = linesOf('r', [section(0, [0, 1], [4, 3]), section(10, [2, 3], [2, 1])], 'step', null, 0);
    expect(before!.again).toBe(2);
  });

  it('are lines over time, also without steps', () => {
    expect([...linesOf('r', [section(5, [null, null], [1, 2])], 'time', null, 0)[0]!.x]).toEqual([5, 6]);
    expect(linesOf('r', [section(5, [null, null], [1, 2])], 'step', null, 0)).toEqual([]);
  });

  it('are lines over samples, by what a metric counts at each step', () => {
    const counted = countedOf([section(0, [0, 10], [100, 1100]), section(9, [10, 20], [1000, 2000])]);
    expect([...counted.amounts]).toEqual([100, 1000, 2000]);
    expect([...linesOf('r', [section(0, [0, 5, 15, 30], [1, 1, 1, 1])], 'samples', counted, 0)[0]!.x]).toEqual([100, 550, 1500, 3000]);
  });

  it('have gaps where values are not finite', () => {
    const [line] = linesOf('r', [section(0, [0, 1, 2], [1, null, 3])], 'step', null, 0.5);
    expect(line!.y.map(Number.isNaN as never)).toEqual(Float64Array.from([0, 1, 0]));
    expect(extentOf([line!], [0, 2], false)).toEqual([1, 3]);
  });

  it('go on with live points, a new section where steps fall back or nothing came for long', () => {
    const history = [section(0, [0, 1, 2], [5, 4, 3])];
    const live = points([2, 3, 4, 5, 100], [3, 2, 1, 2, 1]);
    const made = withLive(history, live, points([2, 3, 4, 5, 100], [2, 3, 4, 2, 3]));
    expect(made.map((one) => one.step)).toEqual([[0, 1, 2, 3, 4], [2], [3]]);
    expect(history[0]!.step).toEqual([0, 1, 2]); // the answer stays as it came
    expect(withLive([], live, points([], []))[0]!.step[0]).toBeNull();
  });

  it('are read at the crosshair, the last one where several are', () => {
    const lines = linesOf('r', [section(0, [0, 1, 2], [5, 4, 3]), section(9, [2, 3], [8, 9])], 'step', null, 0);
    const [read] = readingsAt(lines, 2.2, [0, 3]);
    expect(read!.line.raw[read!.at]).toBe(8);
    expect(readingsAt(lines, 90, [0, 100])).toEqual([]);
  });

  it('know their ends and their extremes in a part', () => {
    const lines = linesOf('r', [section(0, [0, 1, 2, 3], [0, 9, 2, 3], 1)], 'step', null, 0);
    expect(domainOf(lines)).toEqual([0, 3]);
    expect(domainOf([])).toBeNull();
    expect(domainOf(linesOf('r', [section(0, [7], [1])], 'step', null, 0))).toEqual([6.5, 7.5]);
    expect(extentOf(lines, [2, 3], false)).toEqual([1, 4]);
    expect(extentOf(lines, [2, 3], false, false)).toEqual([2, 3]);
    expect(extentOf(linesOf('r', [section(0, [0], [0])], 'step', null, 0), [0, 0], true)).toBeNull(); // nothing above 0
  });

  it('are not flattened by one point of one rank', () => {
    const one = section(0, Array.from({ length: 200 }, (_, at) => at), Array.from({ length: 200 }, () => 1), 0.1);
    one.high[7] = 1e6;
    expect(extentOf(linesOf(null, [one], 'step', null, 0), [0, 199], false)).toEqual([0.9, 1.1]);
  });

  it('tell the step at a time', () => {
    const sections = [section(0, [0, 1, 2], [1, 1, 1]), section(100, [1, 2], [1, 1])];
    expect([stepAt(sections, -5), stepAt(sections, 1.2), stepAt(sections, 50), stepAt(sections, 101), stepAt([], 1)]).toEqual([0, 1, 2, 2, null]);
  });
});

describe('smoothing', () => {
  const x = Float64Array.from({ length: 101 }, (_, at) => at);

  it('keeps a constant and what is not finite', () => {
    const y = x.map((at) => (at === 50 ? NaN : 7));
    expect([...smooth(x, y, 0.9, 100)].filter((one) => !Number.isNaN(one)).every((one) => Math.abs(one - 7) < 1e-9)).toBe(true);
    expect(smooth(x, y, 0.9, 100)[50]).toBeNaN();
  });

  it('weighs by distance: as many points more change little', () => {
    const dense = Float64Array.from({ length: 1001 }, (_, at) => at / 10);
    const wave = (at: number): number => Math.sin(at / 10);
    const [few, many] = [smooth(x, x.map(wave), 0.98, 100), smooth(dense, dense.map(wave), 0.98, 100)];
    expect(Math.abs(few[80]! - many[800]!)).toBeLessThan(0.1);
    expect(Math.abs(few[80]! - wave(80))).toBeGreaterThan(0.001);
  });

  it('bears points at one place', () => {
    expect([...smooth(Float64Array.from([1, 1]), Float64Array.from([0, 2]), 0.5, 0)].every(Number.isFinite)).toBe(true);
  });
});

it('interpolates, also beyond the ends', () => {
  const [steps, amounts] = [Float64Array.from([0, 10]), Float64Array.from([0, 100])];
  expect([interpolate(steps, amounts, 5), interpolate(steps, amounts, 20), interpolate(new Float64Array(0), amounts, 1)]).toEqual([50, 200, NaN]);
});

it.each([
  [['loss', 'num_input_tokens_seen'], 'num_input_tokens_seen'],
  [['train/samples_seen', 'loss'], 'train/samples_seen'],
  [['tokens'], 'tokens'],
  [['total_tokens'], 'total_tokens'],
  [['samples_per_second', 'tokens_per_second', 'loss'], null],
])('of %j samples are counted by %s', (names, found) => expect(countName(names)).toBe(found));

it('keeps zoom and pinned metrics in the address', () => {
  expect(parseZoom(formatZoom([900, 1400]))).toEqual([900, 1400]);
  expect(parseZoom(formatZoom([0.5, 1.25]))).toEqual([0.5, 1.25]);
  expect([parseZoom('5-5'), parseZoom('x'), parseZoom(undefined)]).toEqual([null, null, null]);
  const names = ['loss', 'a,b', '100 %', 'loss'];
  expect(parsePinned(formatPinned(names))).toEqual(['loss', 'a,b', '100 %']);
});

function mark(kind: string, given: Partial<RunMark> = {}): RunMark {
  return { kind, time: 100, event: 1, step: null, ...given };
}

const CHANGE = mark('command', { do: 'update_config', by: 'ada', params: { lr: 0.05 }, changes: { lr: { old: 0.1, new: 0.05 } }, applied: 8, refused: 0, step: 1642, last_step: 1753 });

describe('marks of a run', () => {
  it('are sentences', () => {
    expect(titleOf(CHANGE)).toBe('lr 0.1 → 0.05');
    expect(acknowledgementOf(CHANGE)).toBe('8 ranks applied it at steps 1,642 to 1,753');
    expect(titleOf(mark('crashed', { replica: 'train_1@s', reason: 'CUDA out of memory', count: 4 }))).toBe('crashed: train_1 and 3 others, CUDA out of memory');
    expect(titleOf(mark('restarted', { count: 2 }))).toBe('restarted: 2 processes');
    expect(titleOf(mark('ended', { state: 'stopped', by: 'ada' }))).toBe('the run ended: stopped by ada');
    expect(titleOf(mark('diagnosis', { text: 'rank 3 is slow' }))).toBe('diagnosis: rank 3 is slow');
    expect(titleOf(mark('command', { do: 'inject', params: { fault: 'crash' }, applied: 1 }))).toBe('inject crash');
  });

  it('tell of refusals and why', () => {
    const refused = mark('command', { do: 'update_config', params: { lr: -1 }, applied: 0, refused: 2, reason: 'larger than 0', changes: {} });
    expect([titleOf(refused), acknowledgementOf(refused), toneOf(refused)]).toEqual(['lr = -1 refused', '2 ranks refused it: larger than 0', 'warning']);
    expect(acknowledgementOf(mark('command', { applied: 1, refused: 1, step: 4, reason: 'no' }))).toBe('1 rank applied it at step 4; 1 rank refused it: no');
    expect(acknowledgementOf(mark('command'))).toBe('no rank has answered yet');
  });

  it('have tones', () => {
    const tones = [CHANGE, mark('crashed'), mark('stalled'), mark('started'), mark('ended', { state: 'completed' }), mark('ended', { state: 'lost' }), mark('command', { do: 'inject', applied: 1 })];
    expect(tones.map(toneOf)).toEqual(['command', 'bad', 'warning', 'plain', 'plain', 'bad', 'warning']);
  });

  it('stand at their step, or where the curve was at their time', () => {
    const sections = [section(95, [50, 51, 52, 53, 54, 55], [1, 1, 1, 1, 1, 1])];
    const places = (axis: 'step' | 'time' | 'samples') => placeMarks([CHANGE, mark('stalled')], axis, sections, countedOf([section(0, [0, 1], [0, 10])])).map((one) => one.x);
    expect(places('step')).toEqual([55, 1642]);
    expect(places('time')).toEqual([100, 100]);
    expect(places('samples')).toEqual([550, 16420]);
    expect(placeMarks([mark('started')], 'step', [], null)).toEqual([]);
  });

  it('are flags, which share one where they are too near', () => {
    const placed = [0, 100, 101, 900].map((x, event) => ({ mark: mark('stalled', { event }), x }));
    const flags = flagsOf(placed, [0, 1000], 1000);
    expect(flags.map((one) => one.marks.length)).toEqual([1, 2, 1]);
    expect(flags.map((one) => one.room > 0)).toEqual([true, true, true]);
    expect(flags.map((one) => one.back)).toEqual([false, false, true]); // the words of the last one have no room on its right
    expect(within([{ mark: CHANGE, x: -5 }, { mark: CHANGE, x: 7 }], [0, 5]).map((one) => one.x)).toEqual([0, 5]);
    expect(flagsOf(placed, [850, 950], 1000).map((one) => one.left)).toEqual([500]);
    expect(flagsOf([{ mark: mark('ended'), x: 1000 }], [0, 1000], 1000)[0]).toMatchObject({ back: true });
    expect(flagsOf([0, 40].map((x, event) => ({ mark: mark('stalled', { event }), x })), [0, 1000], 1000)[0]!.room).toBe(0); // no word has room
  });

  it('have words for what somebody did before those for a start', () => {
    const [start, change] = flagsOf([{ mark: mark('started', { count: 4 }), x: 0 }, { mark: CHANGE, x: 200 }], [0, 260], 260);
    expect(change).toMatchObject({ back: true });
    expect(change!.room).toBeGreaterThan(110);
    expect(start!.room).toBeLessThan(90);
  });

  it('of a flag a command is the chief', () => expect(chiefOf([mark('crashed'), CHANGE, mark('started')])).toBe(CHANGE));

  it('of a thousand in a row fold into few flags', () => {
    const placed = Array.from({ length: 1000 }, (_, event) => ({ mark: mark('stalled', { event }), x: event }));
    const flags = flagsOf(placed, [0, 999], 800);
    expect(flags.length).toBeLessThan(32);
    expect(flags.reduce((sum, one) => sum + one.marks.length, 0)).toBe(1000);
  });
});

const RUN = { state: 'crashed', first: 'train_1@s', reason: 'CUDA out of memory.', by: null, step: 4255, max_step: 20000 };

describe('what is said of a run', () => {
  it('is its cause in words', () => {
    expect(causeOf(RUN)).toBe('crashed: train_1 first, CUDA out of memory, at step 4,255 of 20,000');
    expect(causeOf({ state: 'stopped', first: null, reason: null, by: 'ada', step: 7, max_step: null })).toBe('stopped by ada: at step 7');
    expect(causeOf({ state: 'lost', first: null, reason: null, by: null, step: null, max_step: null })).toBe('lost');
  });

  it('is what its metrics report, in units', () => {
    const metrics = { mfu: 0.421, 'train/grad_norm': 1.5, tokens_per_second: 200_000, 'memory/max_reserved_gib': 61.5, loss: 2 };
    const figures = reportedFigures(Object.keys(metrics), (name) => metrics[name as keyof typeof metrics]);
    expect(figures.map((one) => `${one.name} ${one.text}`)).toEqual(['tokens/s 200,000', 'MFU 42.1 %', 'gradient norm 1.5', 'GPU memory 61.5 GiB']);
    expect(reportedFigures(['throughput(tps)', 'mfu(%)', 'memory_bytes'], (name) => ({ 'throughput(tps)': 9, 'mfu(%)': 42, memory_bytes: 3 * 2 ** 30 })[name]!).map((one) => one.text)).toEqual(['9', '42.0 %', '3 GiB']);
    expect(reportedFigures(['loss', 'num_input_tokens_seen'], () => 1)).toEqual([]);
    expect(reportedFigures(['mfu'], () => null)).toEqual([]);
  });

  it('is the pace, the rest and the cost', () => {
    expect(meanRate({ began: 10, ended: 30, step: 100 })).toBe(5);
    expect(meanRate({ began: 10, ended: null, step: 100 })).toBeNull();
    expect([leftAt(100, 700, 5), leftAt(700, 700, 5), leftAt(1, null, 5), leftAt(1, 5, null)]).toEqual(['2 min', null, null, null]);
    const run = { start: { gpus: ['H100', 'H100'] }, members: [{ host: 'a' }, { host: 'b' }, { host: 'a' }], began: 0, ended: 7200 } as unknown as RunDetails;
    expect([gpusOf(run, 0), gpusOf(run, 3)]).toEqual([4, 3]);
    expect([costOf(run, 4, 2.5, 0), costOf(run, 0, 2.5, 0), costOf(run, 4, null, 0)]).toEqual([20, null, null]);
  });

  it('is the configuration after all changes that were applied', () => {
    const refused = { ...CHANGE, applied: 0, changes: { lr: { old: 0.05, new: 9 } } };
    expect(configAfter({ config: { lr: 0.1, size: 8 }, timeline: [CHANGE, refused] })).toEqual({ lr: 0.05, size: 8 });
  });

  it('is the line that branches from it', () => {
    expect(branchCommand('3f2a9c', 900, { learning_rate: '0.5x' }, false)).toBe('loom branch 3f2a9c --step 900 --set learning_rate=0.5x');
    expect(branchCommand("a'b", null, { note: 'two words' }, true)).toBe("loom branch 'a'\\''b' --set 'note=two words' --replace");
  });
});

describe('a new value', () => {
  it('is said against the present one and the schedule', () => {
    expect(meaningOf('lr', 0.05, { lr: 0.1 }, ['lr'])).toBe('× 0.5');
    expect(meaningOf('lr', 0.05, { lr: 0.1, lr_schedule: 0.08 }, ['lr'])).toBe("× 0.5; holds in place of the schedule's 0.08 until it is taken back");
    expect(meaningOf('lr', 0.05, { lr: 0.1 }, ['lr', 'lr_factor'])).toContain("in place of the schedule's");
    expect(meaningOf('lr', null, { lr: 0.1, lr_schedule: 0.08 }, ['lr'])).toBe("the schedule's value again, now 0.08");
    expect(meaningOf('lr_factor', 0.5, { lr: 0.1, lr_factor: 1 }, ['lr', 'lr_factor'])).toBe("lr is the schedule's × 0.5: now 0.05");
    expect(meaningOf('mode', 'fast', { mode: 'slow' }, ['mode'])).toBe('');
  });

  it('has a place on a slider', () => {
    expect([sliderPlace(1, 0.1), sliderPlace(0.1, 0.1), sliderPlace(1e-9, 0.1), sliderPlace(-1, 1)]).toEqual([100, 0, -100, null]);
    expect([sliderValue(0, 0.037, 'float'), sliderValue(-30, 0.037, 'float'), sliderValue(-100, 3, 'int'), sliderValue(50, 4, 'int')]).toEqual(['0.037', '0.019', '1', '13']);
  });
});

describe('notes in Markdown', () => {
  it('have paragraphs, headings, lists and code', () => {
    expect(parseMarkdown('# Half\n\none\ntwo\n- a\n- b\n1. c\n```\n<b>\n```').map((one) => one.kind)).toEqual(['heading', 'paragraph', 'list', 'list', 'code']);
    expect(parseMarkdown('```\nnot closed')).toEqual([{ kind: 'code', text: 'not closed' }]);
    expect(parseMarkdown('')).toEqual([]);
  });

  it('have bold, italics, code and links', () => {
    const kinds = (text: string): string[] => parseSpans(text).map((one) => one.kind);
    expect(kinds('a **b** *c* `d` [e](https://f.example/g)')).toEqual(['text', 'bold', 'text', 'italic', 'text', 'code', 'text', 'link']);
    expect(kinds('2 * 3 * 4 and learning_rate_factor')).toEqual(['text']);
    expect(parseSpans('`**no**`')).toEqual([{ kind: 'code', text: '**no**' }]);
    expect(parseSpans('see https://f.example/a.')).toMatchObject([{ kind: 'text' }, { kind: 'link', address: 'https://f.example/a' }, { text: '.' }]);
  });

  it.each(['[x](javascript:alert(1))', '[x](data:text/html,y)', '<img src=x onerror=alert(1)>', '[x](//evil.example)', '[x](JaVaScRiPt:alert(1))'])('have no link from %s', (text) => {
    expect(JSON.stringify(parseMarkdown(text))).not.toContain('"link"');
  });

  it('end for hostile texts', () => {
    for (const text of ['*'.repeat(20_000), '['.repeat(20_000), '**a'.repeat(5000), '_'.repeat(20_000), '`'.repeat(20_000), '- '.repeat(10_000), '`a` '.repeat(8000), '*a* '.repeat(8000), '[a](https://b) '.repeat(2000)]) parseMarkdown(text);
  });
});
