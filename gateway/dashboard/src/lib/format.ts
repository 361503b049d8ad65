/** Numbers, durations and times as text, with their units. */

const DASH = '–';

export function toNumber(value: unknown): number | null {
  if (typeof value === 'number') return value;
  if (value === 'NaN') return NaN;
  if (value === 'Infinity') return Infinity;
  if (value === '-Infinity') return -Infinity;
  return null;
}

const groups = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });

export function count(value: number | null | undefined): string {
  return value == null ? DASH : groups.format(value);
}

/** A measured number with about four significant digits. */
export function number(value: number | null | undefined): string {
  if (value == null) return DASH;
  if (!Number.isFinite(value)) return Number.isNaN(value) ? 'NaN' : value > 0 ? '∞' : '−∞';
  const size = Math.abs(value);
  if (size === 0) return '0';
  if (size >= 1e7 || size < 1e-4) return value.toExponential(2).replace('e+', 'e');
  if (size >= 1000) return groups.format(value);
  return String(Number(value.toPrecision(4)));
}

export function percent(share: number | null | undefined, digits = 0): string {
  return share == null ? DASH : `${(share * 100).toFixed(digits)} %`;
}

export function bytes(size: number | null | undefined): string {
  if (size == null) return DASH;
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 || size >= 100 ? Math.round(size) : size.toFixed(1)} ${units[unit]}`;
}

/** A duration of some seconds, such as `850 ms`, `12.4 s`, `3 min 5 s` or `2 h 10 min`. */
export function duration(seconds: number | null | undefined): string {
  if (seconds == null) return DASH;
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds === 0) return '0 s';
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 60 && Number.isInteger(seconds)) return `${seconds} s`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(2) : seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return both(days, 'd', hours, 'h');
  if (hours) return both(hours, 'h', minutes, 'min');
  return both(minutes, 'min', whole % 60, 's');
}

function both(large: number, unit: string, small: number, smaller: string): string {
  return small ? `${large} ${unit} ${small} ${smaller}` : `${large} ${unit}`;
}

/** A time relative to now, both in seconds since the epoch. */
export function ago(time: number | null | undefined, now: number): string {
  if (time == null || time <= 0) return DASH;
  const passed = now - time;
  if (passed < -1) return `in ${rough(-passed)}`;
  return passed < 2 ? 'now' : `${rough(passed)} ago`;
}

function rough(seconds: number): string {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

const moment = new Intl.DateTimeFormat(undefined, { dateStyle: 'medium', timeStyle: 'medium' });
const hour = new Intl.DateTimeFormat(undefined, {
  hour: '2-digit',
  minute: '2-digit',
  second: '2-digit',
  hourCycle: 'h23',
});

export function local(time: number): string {
  return moment.format(time * 1000);
}

export function clock(time: number): string {
  return hour.format(time * 1000);
}

/** A value of a configuration as text: JSON, but texts without quotes. */
export function value(given: unknown): string {
  if (given === undefined) return DASH;
  if (typeof given === 'string') return given === '' ? '""' : given;
  if (typeof given === 'number') return Number.isInteger(given) ? String(given) : String(Number(given.toPrecision(6)));
  return JSON.stringify(given);
}

export function plural(amount: number, one: string, many = `${one}s`): string {
  return `${count(amount)} ${amount === 1 ? one : many}`;
}

/** The first part of a replica's id: the id without its session. */
export function shortName(id: string): string {
  const at = id.indexOf('@');
  return at > 0 ? id.slice(0, at) : id;
}

const DIRECTED = /[\u0590-\u08ff\u200e\u200f\u202a-\u202e\u2066-\u2069\ufb1d-\ufdff\ufe70-\ufefc]/;

/** Return a text for use in a sentence: one that may change the direction of writing is isolated from the rest. */
export function isolate(text: string): string {
  return DIRECTED.test(text) ? `\u2068${text.replace(/[\u2066-\u2069]/g, '')}\u2069` : text;
}
