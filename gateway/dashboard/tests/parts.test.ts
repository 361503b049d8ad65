import { readFileSync } from 'node:fs';
import { join } from 'node:path';

import { describe, expect, it } from 'vitest';

import { CellPixels, wordOf } from '../src/lib/cells';
import { colourCells, FIRST_OF_RAMP, NOT_FINITE, RAMP_BINS, UNKNOWN, type Mode } from '../src/lib/colouring';
import { CommandLog, describeUndo, outcomeOf, readAcknowledgement, replicasOf, takeBack } from '../src/lib/commands';
import { describeEvent } from '../src/lib/events';
import { failureChains, runningInjections } from '../src/lib/failures';
import { FAULTS } from '../src/lib/faults';
import * as format from '../src/lib/format';
import { actionOf, globToRegExp, searchFor, selectTargets } from '../src/lib/glob';
import { courseShares, faultTimes } from '../src/lib/goodput';
import { arrange, cellAt, cellsIn, endOf, gapOf, placeOf } from '../src/lib/layout';
import { commandMarks, marksOfJobs } from '../src/lib/marks';
import { packNames, unpackNames } from '../src/lib/names';
import { codeIn, formatRoute, parseRoute } from '../src/lib/route';
import { orderBy, type Measure } from '../src/lib/sorting';
import { fieldOf, keysOf, parseValue } from '../src/lib/values';
import { columnsOf, event, replica } from './objects';

describe('numbers', () => {
  it.each([
    [0.1, '0.1'],
    [1234567, '1,234,567'],
    [0.00001234, '1.23e-5'],
    [2.345678, '2.346'],
    [NaN, 'NaN'],
    [-Infinity, '−∞'],
    [null, '–'],
  ])('%s is %s', (given, text) => expect(format.number(given)).toBe(text));

  it.each([
    [0.00001, '10 µs'],
    [0.0042, '4.2 ms'],
    [0.85, '850 ms'],
    [12.44, '12.4 s'],
    [185, '3 min 5 s'],
    [7800, '2 h 10 min'],
    [90000, '1 d 1 h'],
    [60, '1 min'],
    [-2, '−2 s'],
    [9.5, '9.50 s'],
    [null, '–'],
  ])('%s seconds are %s', (given, text) => expect(format.duration(given)).toBe(text));

  it('have units', () => {
    expect(format.bytes(0)).toBe('0 B');
    expect(format.bytes(1536)).toBe('1.5 KiB');
    expect(format.bytes(80 * 2 ** 30)).toBe('80.0 GiB');
    expect(format.percent(0.9514, 1)).toBe('95.1 %');
    expect(format.plural(1, 'replica')).toBe('1 replica');
    expect(format.plural(10_000, 'replica')).toBe('10,000 replicas');
  });

  it('and times are relative', () => {
    expect(format.ago(100, 101)).toBe('now');
    expect(format.ago(100, 145)).toBe('45 s ago');
    expect(format.ago(100, 100 + 7300)).toBe('2 h ago');
    expect(format.ago(160, 100)).toBe('in 1 min');
    expect(format.ago(null, 1)).toBe('–');
  });

  it('and values are shown as they are written', () => {
    expect([0.1 + 0.2, 3, 'fast', '', true, [1, 2], undefined].map(format.value)).toEqual(['0.3', '3', 'fast', '""', 'true', '[1,2]', '–']);
  });
});

describe('globs', () => {
  it.each([
    ['train_*', 'train_10', true],
    ['train_?', 'train_10', false],
    ['train_[0-3]', 'train_2', true],
    ['train_[!0-3]', 'train_2', false],
    ['a.c', 'abc', false],
    ['*@s1', 'train_0@s1', true],
    ['[', '[', true],
    ['x[z-a]', 'xz', false],
    ['*', 'a\nb', true],
  ])('%s and %s', (glob, name, matches) => expect(globToRegExp(glob).test(name)).toBe(matches));

  const replicas = new Map(
    [
      replica('train_0@s1'),
      replica('train_1@s1', { state: 'failed' }),
      replica('eval_0@s1', { group: 'eval' }),
    ].map((one) => [one.id, one]),
  );
  const ids = (target: string | string[]): string[] => selectTargets(target, replicas).map((one) => one.id);

  it('select replicas as the weaver does', () => {
    expect(ids('*')).toEqual(['train_0@s1', 'eval_0@s1']);
    expect(ids('train')).toEqual(['train_0@s1']);
    expect(ids('eval_?')).toEqual(['eval_0@s1']);
    expect(ids('train_1@s1')).toEqual(['train_1@s1']);
    expect(ids(['train_1@s1', 'gone'])).toEqual(['train_1@s1']);
    expect(ids('nobody')).toEqual([]);
  });

  it('and parts of names are searched for', () => {
    const found = (text: string): number => [...replicas.values()].filter(searchFor(text)).length;
    expect([found(''), found('TRAIN'), found('node-1'), found('ev*')]).toEqual([3, 2, 3, 1]);
  });

  it('choose policies: the own one, then the newest glob', () => {
    expect(actionOf('train', { train: 'stop', '*': 'pause' })).toBe('stop');
    expect(actionOf('other', { '*': 'pause', 'o*': 'respawn' })).toBe('respawn');
    expect(actionOf('other', {})).toBe('notify');
  });
});

describe('addresses', () => {
  it('hold the view, its parts and the query', () => {
    const hash = formatRoute('replicas', ['train_0@s/1 ü'], { q: 'a b*', by: null, none: '' });
    expect(parseRoute(hash)).toEqual({ view: 'replicas', parts: ['train_0@s/1 ü'], query: { q: 'a b*' } });
  });

  it.each(['', '#', '#/nowhere/x?y=1', '#/%E0%A4%A'])('%s leads to the overview', (hash) =>
    expect(parseRoute(hash)).toEqual({ view: 'overview', parts: [], query: {} }),
  );

  it('may hold a code', () => {
    expect(codeIn('#code=a-b_c')).toBe('a-b_c');
    expect(codeIn('#/overview')).toBeNull();
  });

  it('hold selections as ranges', () => {
    const names = ['train_0@s', 'train_1@s', 'train_2@s', 'train_9@s', 'x,{y}%', 'train_007@s', '<b>'];
    const packed = packNames(names);
    expect(packed).toContain('train_{0-2,9}@s');
    expect(new Set(unpackNames(packed))).toEqual(new Set(names));
    expect(unpackNames(packNames(Array.from({ length: 10_000 }, (_, at) => `r${at}`)))).toHaveLength(10_000);
    expect(unpackNames('a{0-99999999999}', 50)).toHaveLength(50);
    expect(unpackNames('{,}}{')).toBeInstanceOf(Array);
  });
});

describe('acknowledgements', () => {
  const message = { type: 'acknowledgement' as const, id: 'c', replica: 'a', ok: true };

  it('may have single values, or values by key', () => {
    expect(readAcknowledgement({ ...message, old: 1, new: 2 }, { rate: 2 }).changes).toEqual({ rate: { old: 1, new: 2 } });
    expect(readAcknowledgement({ ...message, old: { a: 1 }, new: { a: 2, b: 3 } }, { a: 2, b: 3 }).changes).toEqual({
      a: { old: 1, new: 2 },
      b: { old: null, new: 3 },
    });
    expect(readAcknowledgement({ ...message, old: null, new: null }, {}).changes).toEqual({});
  });

  it('that wait do not replace answers', () => {
    const log = new CommandLog();
    log.add('c', 'pause', '*', {}, 'ada', 1);
    log.acknowledge(message, 2);
    log.acknowledge({ ...message, ok: false, waiting: true }, 3);
    expect(log.get('c')!.acknowledgements.get('a')).toMatchObject({ ok: true, waiting: false });
  });

  it('that the program took are not told as applied', () => {
    const log = new CommandLog();
    const changes = { rate: { old: 1, new: 2 }, beta: { old: 3, new: 4 } };
    log.add('c', 'update_config', '*', {}, 'ada', 1);
    const taken = (...keys: string[]): string => {
      log.acknowledge({ ...message, changes, taken: keys }, 2);
      return outcomeOf(log.get('c')!);
    };
    expect([taken('rate', 'beta'), taken('rate'), taken()]).toEqual(['taken by the program', 'applied', 'applied']);
    log.acknowledge({ ...message, replica: 'b', changes, taken: ['rate', 'beta'] }, 2);
    expect(outcomeOf(log.get('c')!)).toBe('applied or taken by the program');
    const told = { command: 'c', do: 'update_config', changes, taken: ['rate', 'beta'] };
    expect(describeEvent(event(5, 'applied', 'a', told)).text).toContain('the program took');
  });

  it("belong to a command by the weaver's id too", () => {
    const log = new CommandLog();
    log.add('mine', 'inject', ['a'], {}, 'ada', 1);
    log.take(event(4, 'command', null, { command: 'theirs', do: 'inject', params: { fault: 'sigstop' }, by: 'ada', replicas: 1 }));
    log.accept('mine', 'theirs', ['a']);
    expect(log.runs.size).toBe(1);
    log.acknowledge({ ...message, id: 'mine' }, 2);
    expect(log.get('theirs')!.acknowledgements.size).toBe(1);
    expect(log.get('mine')!.event).toBe(4);
  });

  it('are counted as they come, and listed by what became of them', () => {
    const log = new CommandLog();
    log.add('c', 'update_config', '*', { rate: 2 }, 'ada', 1);
    log.accept('c', 'c', ['a', 'b', 'd', 'e']);
    log.acknowledge({ ...message, replica: 'b', changes: { rate: { old: 1, new: 2 } } }, 2);
    log.acknowledge({ ...message, replica: 'd', ok: false, refused: { rate: 'too high' } }, 2);
    log.acknowledge({ ...message, replica: 'e', ok: false, waiting: true, reason: 'slow' }, 2);
    const run = log.get('c')!;
    expect(replicasOf(run, 0, 10)).toEqual(['d', 'a', 'e', 'b']);
    expect(replicasOf(run, 1, 3)).toEqual(['a', 'e']);
    expect(replicasOf(run, 3, 4)).toEqual(['b']);
    expect([run.applied.size, run.refused.size, run.pending.size, run.why]).toEqual([1, 1, 2, 'too high']);
    log.take(event(9, 'command', null, { command: 'c', do: 'update_config', params: { rate: 2 }, by: 'ada', replicas: 4 }));
    log.take(event(10, 'applied', 'b', { command: 'c', changes: { rate: { old: 1, new: 2 } } }));
    expect(takeBack(run)).toEqual([{ kind: 'update_config', target: ['b'], params: { rate: 1 } }]);
    expect(describeUndo(run)).toEqual(['rate = 1']);
  });

  it.each([
    [{ a: 'it has ended' }, 0, 'done'],
    [{ a: 'it has ended', b: 'there is none' }, 0, 'done'],
    [{ a: 'it has ended' }, 7, 'done'],
    [{}, 0, 'accepted'],
  ])('include those that refused at once: %o and %i more', (refused, more, phase) => {
    const log = new CommandLog();
    const named = Object.keys(refused).length;
    const replicas = named + more + 1;
    const about = { command: 'c', do: 'pause', params: {}, by: 'ada', replicas, refused, refused_more: more };
    log.take(event(1, 'command', null, about));
    if (named) log.take(event(2, 'applied', 'z', { command: 'c', do: 'pause', ok: true }));
    expect([log.get('c')!.phase, log.get('c')!.refused.size]).toEqual([phase, named]);
  });

  it('of old commands are forgotten, so that memory stays flat', () => {
    const log = new CommandLog();
    for (let run = 0; run < 12; run += 1) {
      log.add(`c${run}`, 'pause', '*', {}, 'ada', run);
      for (let at = 0; at < 10_000; at += 1) log.acknowledge({ ...message, id: `c${run}`, replica: `r${at}` }, run);
      log.done(`c${run}`);
    }
    log.add('last', 'pause', '*', {}, 'ada', 99);
    expect(log.list().map((one) => one.id)).toEqual(['last', ...Array.from({ length: 10 }, (_, at) => `c${11 - at}`)]);
  });

  it('give a schedule back whose value they had replaced', () => {
    const log = new CommandLog();
    const run = log.add('c', 'update_config', '*', { rate: 2 }, 'ada', 1);
    log.acknowledge({ ...message, changes: { rate: { old: 1, new: 2, back: { rate: null } }, size: { old: 4, new: 8 } } }, 2);
    expect(takeBack(run)).toEqual([{ kind: 'update_config', target: ['a'], params: { rate: null, size: 4 } }]);
    expect(describeUndo(run)).toEqual(['rate = null, size = 4']);
  });

  it('whose old value is unknown cannot be taken back', () => {
    const log = new CommandLog();
    const run = log.add('c', 'update_config', '*', { rate: 2 }, 'ada', 1);
    log.acknowledge({ ...message, changes: { rate: { old: null, new: 2 } } }, 2);
    expect(takeBack(run)).toEqual([]);
    expect(takeBack(log.add('p', 'pause', '*', {}, 'ada', 1))).toEqual([]);
  });
});

describe('values', () => {
  it('have fields for their types', () => {
    expect(fieldOf('float').input).toBe('number');
    expect(fieldOf('int | None').input).toBe('number');
    expect(fieldOf('bool').choices).toEqual(['true', 'false']);
    expect(fieldOf("'a' | 'b'").choices).toEqual(['a', 'b']);
    expect(fieldOf('Mode(FAST, SLOW)').choices).toEqual(['FAST', 'SLOW']);
    expect(fieldOf('list[float]').input).toBe('json');
  });

  it.each([
    ['0.002', 'float', 0.002],
    ['1e-3', 'float', 0.001],
    ['12', 'int', 12],
    ['null', 'int | None', null],
    [' x ', 'str', ' x '],
    ['true', 'bool', true],
    ['[1, 2]', 'list[float]', [1, 2]],
    ['2', '1 | 2', 2],
    ['FAST', 'Mode(FAST, SLOW)', 'FAST'],
    ['cosine', 'object', 'cosine'],
  ])('%s of type %s', (text, type, value) => expect(parseValue(text, type)).toEqual({ ok: true, value }));

  it.each([
    ['fast', 'float'],
    ['1.5', 'int'],
    ['', 'float'],
    ['yes', 'bool'],
  ])('%s is no %s', (text, type) => expect(parseValue(text, type).ok).toBe(false));

  it('are known by key', () => {
    const keys = keysOf(
      [
        { handlers: { rate: 'float', extra: 'int' }, config: { rate: 0.1 } },
        { handlers: { rate: 'float' }, config: { rate: 0.1 } },
        { handlers: { rate: 'float' }, config: { rate: 0.2 } },
      ],
      format.value,
    );
    expect(keys.map((one) => [one.name, one.takers])).toEqual([['rate', 3], ['extra', 1]]);
    expect(keys[0]!.values).toEqual([{ text: '0.1', count: 2 }, { text: '0.2', count: 1 }]);
  });
});

describe('the grid', () => {
  it('finds cells by place and places by cell', () => {
    const groups = [...Array(30).fill('a'), ...Array(10).fill('b')];
    const layout = arrange(groups, 300, 400);
    expect(layout.labelled).toBe(true);
    for (const index of [0, 9, 29, 30, 39]) {
      const { x, y } = placeOf(layout, index);
      expect(cellAt(layout, x + 1, y + 1)).toBe(index);
    }
    expect(cellAt(layout, 5, 5)).toBe(-1);
    expect(cellsIn(layout, 0, 0, 1000, 1000)).toHaveLength(40);
  });

  it('has room for ten thousand', () => {
    const layout = arrange(Array(10_000).fill('train'), 1100, 460);
    expect(layout.height).toBeLessThanOrEqual(500);
    expect(layout.cell).toBeGreaterThanOrEqual(5);
  });

  it('writes only the cells that have changed', () => {
    const layout = arrange([...Array(6).fill('a'), ...Array(2).fill('b')], 120, 10);
    const size = layout.cell - gapOf(layout.cell);
    const pixels = new CellPixels(layout, 8, 120, size, 2);
    const colours = Uint32Array.of(0, wordOf([1, 2, 3]), wordOf([255, 0, 7]));
    const at = (index: number, dx = 0): number[] => {
      const { x, y } = placeOf(layout, index);
      const first = (y * 2 * pixels.width + x * 2 + dx) * 4;
      return [...pixels.bytes.slice(first, first + 4)];
    };
    const ones = new Uint8Array(8).fill(1);
    expect(pixels.paint(ones, null, colours)).toEqual([layout.blocks[0]!.top * 2, (endOf(layout, layout.blocks[1]!) - gapOf(layout.cell)) * 2]);
    expect([at(0), at(7), at(0, size * 2 - 1), at(0, size * 2)]).toEqual([[1, 2, 3, 255], [1, 2, 3, 255], [1, 2, 3, 255], [0, 0, 0, 0]]);
    expect(pixels.paint(ones, ones, colours)).toBeNull();
    const other = ones.with(6, 2);
    expect(pixels.paint(other, ones, colours)![0]).toBe(layout.blocks[1]!.top * 2);
    expect([at(6), at(7)]).toEqual([[255, 0, 7, 255], [1, 2, 3, 255]]);
  });

  it('has a colour for each state and value', () => {
    const cell = { state: 'running', job: 'j', step: 10, loss: 1, pace: 0.1 };
    const bins = (mode: Mode, ...cells: Parameters<typeof columnsOf>[0]): number[] => [
      ...colourCells(mode, Uint32Array.from(cells.keys()), columnsOf(cells)).bins,
    ];
    expect(bins('state', cell, { ...cell, state: 'failed' }, { ...cell, state: 'new' })).toEqual([1, 6, UNKNOWN]);
    expect(bins('lag', cell, { ...cell, step: 0 }, { ...cell, step: null }, { ...cell, state: 'failed' })).toEqual([
      FIRST_OF_RAMP,
      FIRST_OF_RAMP + RAMP_BINS - 1,
      UNKNOWN,
      UNKNOWN,
    ]);
    expect(bins('lag', cell, { ...cell, job: 'k', step: 3 })).toEqual([FIRST_OF_RAMP, FIRST_OF_RAMP]);
    expect(bins('loss', cell, { ...cell, loss: NaN }, { ...cell, loss: Infinity }, { ...cell, loss: null })).toEqual([
      FIRST_OF_RAMP,
      NOT_FINITE,
      NOT_FINITE,
      UNKNOWN,
    ]);
    expect(colourCells('pace', new Uint32Array(0), columnsOf([])).low).toBeNull();
  });

  it('keeps its range while that fits about', () => {
    const numbers = Uint32Array.of(0, 1);
    const first = colourCells('loss', numbers, columnsOf([{ loss: 0 }, { loss: 100 }]));
    const kept = colourCells('loss', numbers, columnsOf([{ loss: 1 }, { loss: 103 }]), first);
    expect([kept.low, kept.high]).toEqual([0, 100]);
    const other = colourCells('loss', numbers, columnsOf([{ loss: 1 }, { loss: 120 }]), kept);
    expect([other.low, other.high]).toEqual([1, 120]);
    expect(colourCells('pace', numbers, columnsOf([{ pace: 1 }, { pace: 100 }]), first).low).toBe(1);
  });

  it('colours the replicas that are found by their numbers', () => {
    const columns = columnsOf([{ state: 'failed' }, { state: 'paused' }, { state: 'running' }]);
    expect([...colourCells('state', Uint32Array.of(2, 0), columns).bins]).toEqual([1, 6]);
  });
});

describe('the order of the table', () => {
  const columns = columnsOf([
    { state: 'running', step: 5, loss: -1.5, pace: 0.2 },
    { state: 'failed', step: 4_000_000_000, loss: 2, pace: null },
    { state: 'paused', step: null, loss: NaN, pace: 0.1 },
    { state: 'running', step: 7, loss: null, pace: 0.3 },
    { state: 'running', step: 7, loss: 0, pace: 0.3 },
  ]);
  const order = (by: Measure, down: boolean): number[] => [...orderBy(by, down, Uint32Array.of(0, 1, 2, 3, 4), columns, [10, 10, 10, 10, null])];

  it.each<[Measure, number[], number[]]>([
    ['state', [0, 3, 4, 2, 1], [1, 2, 0, 3, 4]],
    ['step', [0, 3, 4, 1, 2], [1, 3, 4, 0, 2]],
    ['lag', [1, 3, 0, 2, 4], [0, 3, 1, 2, 4]],
    ['loss', [0, 4, 1, 2, 3], [2, 1, 4, 0, 3]],
    ['pace', [2, 0, 3, 4, 1], [3, 4, 0, 2, 1]],
  ])('by %s has those without a value last', (by, up, down) => {
    expect(order(by, false)).toEqual(up);
    expect(order(by, true)).toEqual(down);
  });
});

describe('events', () => {
  it.each([
    ['finished', { ending: 'completed', reason: 'it made its last step' }, 'finished, completed: it made its last step'],
    ['finished', { ending: 'stopped', ended_by: 'ada', reason: 'told to stop' }, 'finished, stopped by ada: told to stop'],
    ['finished', { ending: 'ended early', reason: 'at step 3' }, 'finished, ended early: at step 3'],
    ['finished', { ending: 'cancelled' }, 'finished, cancelled'],
    ['failed', { ending: 'crashed', reason: 'killed by SIGSEGV' }, 'failed: killed by SIGSEGV'],
    ['failed', { ending: 'lost', why: 'silent' }, 'failed: lost, silent'],
    ['failed', { ending: 'lost' }, 'failed: lost'],
    ['failed', { why: 'silent' }, 'failed: silent'],
    ['finished', {}, 'finished'],
  ])('say how a replica ended: %s %o', (kind, data, text) => {
    expect(describeEvent(event(1, kind, 'a', data)).text).toBe(text);
  });

  it('are sentences', () => {
    expect(describeEvent(event(1, 'registered', 'a', { host: 'node-1', step: 5 })).text).toBe('registered on node-1 at step 5');
    expect(describeEvent(event(1, 'applied', 'a', { do: 'update_config', step: 7, changes: { rate: { old: 1, new: 2 } } })).text).toBe(
      'applied update_config at step 7: rate 1 → 2',
    );
    expect(describeEvent(event(1, 'something_new', null)).text).toBe('something new');
    const turned = describeEvent(event(1, 'registered', 'a', { host: '\u202eevil', step: 5 })).text;
    expect(turned).toBe('registered on \u2068\u202eevil\u2069 at step 5');
    expect(describeEvent(event(1, 'failed', 'a', { reason: 'SIGKILL' }))).toEqual({ text: 'failed: SIGKILL', tone: 'bad' });
  });

  it('name processes by their replicas, or by rank and mesh', () => {
    const died = { what: 'died', reason: 'process 1 is gone', procs: 39, mesh: 'train', rank: 1 };
    const text = (more: Record<string, unknown>) => describeEvent(event(1, 'supervision', null, { ...died, ...more })).text;
    expect(text({ replicas: ['train_1@mine'] })).toBe('train_1: died: process 1 is gone');
    expect(text({ replicas: [] })).toBe('rank 1 of train: died: process 1 is gone');
    expect(text({ replicas: [], mesh: null, rank: null })).toBe('a mesh: died: process 1 is gone');
    expect(text({ replicas: ['a', 'b', 'c', 'd'] })).toBe('4 replicas of train: died: process 1 is gone');
    expect(describeEvent(event(1, 'spawned', null, { procs: 39, mesh: 'train', what: '2 of train' })).text).toBe('processes were started: 2 of train');
  });

  it('tell the chain of a failure', () => {
    const failed = event(1, 'device_failed', null, {
      device: { uuid: 'GPU-1', server: 'node-1' },
      reason: 'Xid 79',
      replicas: [{ replica: 'a', group: 'train', state: 'running', action: 'pause', commands: ['c'] }],
    });
    const command = event(2, 'command', null, { cause: 1, do: 'pause' });
    const applied = event(3, 'applied', 'a', { cause: 2, do: 'pause' });
    const [chain] = failureChains([failed, command, applied, event(4, 'applied', 'a', { cause: null })]);
    expect(chain!.device).toBe('GPU-1');
    expect(chain!.replicas[0]!.then.map((one) => one.id)).toEqual([3]);
  });

  it('tell which faults are present', () => {
    const log = new CommandLog();
    const inject = event(1, 'command', null, { command: 'c', do: 'inject', params: { fault: 'slow_rank', duration: 60 }, by: 'ada', replicas: 2 });
    log.take(inject);
    for (const name of ['a', 'b']) log.take(event(2, 'applied', name, { command: 'c', do: 'inject', ok: true }));
    const running = runningInjections(log.list(), [event(9, 'fault_removed', 'b', { injection: 'c' })], 1010);
    expect(running.map((one) => [one.fault, one.replicas])).toEqual([['slow_rank', ['a']]]);
    expect(runningInjections(log.list(), [], 5000)).toEqual([]);
  });

  it('are marks on curves', () => {
    const log = new CommandLog();
    log.take(event(1, 'command', null, { command: 'c', do: 'update_config', params: { rate: 2 }, by: 'ada', replicas: 1 }));
    log.take(event(2, 'applied', 'a', { command: 'c', do: 'update_config', ok: true }));
    expect(commandMarks(log.list(), 'a')).toEqual([{ time: 1002, text: 'rate = 2, by ada' }]);
    expect(commandMarks(log.list(), 'b')).toEqual([]);
    const jobs = marksOfJobs(log.list(), (id) => (id === 'a' ? 'job' : undefined));
    expect(jobs.get('job')!.map((one) => one.time)).toEqual([1002]);
    log.take(event(3, 'applied', 'b', { command: 'c', do: 'update_config', ok: true }));
    const more = marksOfJobs(log.list(), (id) => (id === 'a' ? 'job' : 'other'));
    expect([...more].map(([job, marks]) => [job, marks[0]!.time])).toEqual([['job', 1002], ['other', 1003]]);
  });
});

describe('goodput', () => {
  const fault = { replica: 'a', reason: 'SIGKILL', time: 10, detected: 11, registered: 14, stepped: 15 };

  it('has the times of faults', () => {
    expect(faultTimes(fault)).toEqual({ detection: 1, respawn: 3, waiting: 1, recovery: 5 });
    expect(faultTimes({ ...fault, registered: null, stepped: null })).toEqual({ detection: 1, respawn: null, waiting: null, recovery: null });
  });

  it('has shares over time', () => {
    const record = {
      job: 'j', since: 0, until: 20, replicas: 1, ratio: 0.5, seconds: {}, faults: [], user: '',
      course: [
        { time: 10, seconds: { compute: 8, own: 2 } },
        { time: 20, seconds: { compute: 8, own: 12 } },
      ],
    }; // prettier-ignore
    expect(courseShares(record).map((one) => one.shares)).toEqual([[['compute', 0.8], ['own', 0.2]], [['own', 1]]]);
  });
});

describe('the table of faults', () => {
  it('is that of the documentation', () => {
    const page = readFileSync(join(import.meta.dirname, '../../../docs/reference/faults.md'), 'utf8');
    const rows = [...page.matchAll(/^\| `(\w+)` \| (\w+) \| (.+?) \| (.*?) \| (.+?) \|$/gm)];
    const written = rows.map(([, name, of, lasts, params, what]) => [name, of, lasts, params!.trim(), what]);
    const shown = FAULTS.map((one) => [
      one.name,
      one.of,
      one.lasts === null ? 'at once' : `${one.lasts} s`,
      one.params.map((param) => `\`${param.name}=${python(param.default, param.type)}\``).join(', '),
      one.what,
    ]);
    expect(shown).toEqual(written);
  });

  function python(given: unknown, type: string): string {
    if (typeof given === 'string') return `'${given}'`;
    if (Array.isArray(given)) return '[]';
    return type === 'float' && Number.isInteger(given) ? `${String(given)}.0` : String(given);
  }
});
