// Numbers as text, and the ticks of an axis.

const MINUS = "\u2212";
const NONE = "\u2013";

/** A number with about `digits` significant digits. */
function significant(value, digits = 4) {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) {
    const [mantissa, power] = value.toExponential(Math.max(0, digits - 2)).split("e");
    return `${mantissa.replace("-", MINUS)}e${power.replace("+", "").replace("-", MINUS)}`;
  }
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  const text = size.toLocaleString("en-US", { maximumFractionDigits: places, minimumFractionDigits: Math.min(places, 3) });
  return (value < 0 ? MINUS : "") + text;
}

function fixed(value, places) {
  if (value === null || value === undefined) return NONE;
  const text = Math.abs(value).toLocaleString("en-US", { maximumFractionDigits: places, minimumFractionDigits: places });
  return (value < 0 ? MINUS : "") + text;
}

function whole(value) {
  return value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en-US");
}

function percent(value, places = 1) {
  if (value === null || value === undefined) return NONE;
  if (value > 0 && value < 0.5 * 10 ** (-places - 2)) return `< ${fixed(10 ** -places, places)}%`;
  return `${fixed(100 * value, places)}%`;
}

const UNITS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]];

/** 1,234,000 as 1.23M. */
function compact(value) {
  if (value === null || value === undefined) return NONE;
  const [unit, name] = UNITS.find(([size]) => Math.abs(value) >= size) ?? [1, ""];
  const scaled = value / unit;
  return `${scaled.toLocaleString("en-US", { maximumSignificantDigits: 3 })}${name}`;
}

function bytes(value) {
  if (value === null || value === undefined) return NONE;
  return value >= 2 ** 30 ? `${fixed(value / 2 ** 30, 2)} GiB` : `${fixed(value / 2 ** 20, 0)} MiB`;
}

function hours(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 1) return `${significant(value, 3)} h`;
  return value >= 1 / 60 ? `${significant(value * 60, 3)} min` : `${significant(value * 3600, 3)} s`;
}

/** Round places for about `count` ticks from `low` to `high`. */
function ticksOf(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw * 0.999) ?? 10);
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9); tick * step <= high + step * 1e-9; tick += 1) {
    ticks.push(Number((tick * step).toPrecision(12)));
  }
  return ticks;
}

/** Ticks of a logarithmic axis: powers of ten, or round numbers where there are few of those. */
function logTicksOf(low, high, count) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const factor of [1, 2, 3, 5]) ticks.push(factor * 10 ** power);
  }
  const within = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  if (within.length < 2) return ticksOf(low, high, count);
  const tens = within.filter((tick) => Number.isInteger(Math.log10(tick)));
  return within.length > 2 * count && tens.length > 1 ? tens : within;
}
