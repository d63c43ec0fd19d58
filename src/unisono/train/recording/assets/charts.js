"use strict";
// Figures as SVG, drawn from plain data: curves, bars, timelines and grids of ranks.
const U = {};

U.node = (ns, tag, attributes, children) => {
  const node = ns ? document.createElementNS(ns, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
};
U.el = (tag, attributes, ...children) => U.node(null, tag, attributes, children);
U.svg = (tag, attributes, ...children) =>
  U.node("http://www.w3.org/2000/svg", tag, attributes, children);
U.color = (index) => `var(--c${((index % 8) + 8) % 8})`;

U.number = (value, digits = 4) => {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(Math.max(0, digits - 2)).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
};
U.time = (seconds) => {
  if (seconds >= 3600) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  if (seconds >= 100) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds >= 1) return `${Number(seconds.toPrecision(3))} s`;
  if (seconds >= 1e-3) return `${Number((seconds * 1e3).toPrecision(3))} ms`;
  return `${Number((seconds * 1e6).toPrecision(3))} µs`;
};
U.bytes = (count) => {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (count >= size) return `${Number((count / size).toPrecision(3))} ${unit}`;
  return `${count} B`;
};
U.percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

U.ticks = (low, high, count) => {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++)
    ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
};
U.logTicks = (low, high) => {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const m of high / low > 1e3 ? [1] : high / low > 8 ? [1, 2, 5] : [1, 1.5, 2, 3, 5, 7])
      if (m * 10 ** power >= low * 0.999 && m * 10 ** power <= high * 1.001) ticks.push(m * 10 ** power);
  return ticks.length ? ticks : [low, high];
};

// A figure: tools above, the drawing, a legend and a caption below.
U.figures = 0;
U.figure = ({ title, caption, wide, tools = [], id }) => {
  const plot = U.el("div", { class: "plot" });
  const legend = U.el("div", { class: "legend" });
  const tip = U.el("div", { class: "tip" });
  U.figures += 1;
  const save = U.el("button", { title: "save this figure", onclick: () => U.save(plot, title) }, "SVG");
  const bar = U.el("div", { class: "tools" }, U.el("span", { class: "title" }, title), tools, save);
  const words = U.el("figcaption", {}, U.el("b", {}, `Figure ${U.figures}. `), caption);
  const figure = U.el("figure", { class: wide ? "wide" : null, id }, bar, plot, legend, words, tip);
  const show = (event, lines) => {
    tip.replaceChildren(...lines.map((line) => U.el("div", {}, line)));
    tip.style.display = "block";
    const box = figure.getBoundingClientRect();
    const left = event.clientX - box.left + 16;
    tip.style.left = `${Math.min(left, box.width - tip.offsetWidth - 8)}px`;
    tip.style.top = `${event.clientY - box.top + 14}px`;
  };
  return { figure, plot, legend, show, hide: () => { tip.style.display = "none"; } };
};
U.key = (label, color, stroke, dash) =>
  U.el("span", {}, U.el("i", {
    class: stroke ? `stroke${dash ? " dash" : ""}` : null,
    style: stroke ? `border-color:${color}` : `background:${color}`,
  }), label);

// Save a drawing with its colours written out, so that it looks the same in a paper.
U.save = (plot, title) => {
  const drawn = plot.querySelector("svg");
  if (!drawn) return;
  const copy = drawn.cloneNode(true);
  const names = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-family",
    "font-size", "font-weight", "text-anchor"];
  const [from, to] = [drawn.querySelectorAll("*"), copy.querySelectorAll("*")];
  from.forEach((node, i) => {
    const style = getComputedStyle(node);
    to[i].setAttribute("style", names.map((n) => `${n}:${style.getPropertyValue(n)}`).join(";"));
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  const link = U.el("a", {
    href: `data:image/svg+xml;charset=utf-8,${encodeURIComponent(copy.outerHTML)}`,
    download: `${title.replace(/[^\w-]+/g, "_")}.svg`,
  });
  link.click();
};

// Curves over a common x. series: [{label, x, y, low, high, color, dash}], gaps are nulls.
U.curves = (view, { series, xLabel, log = false, zero = false, width = 520, height = 260 }) => {
  const [W, H, L, R, T, B] = [width, height, 56, 14, 10, 40];
  const usable = (v) => v !== null && v !== undefined && (!log || v > 0);
  const xs = series.flatMap((s) => s.x);
  const band = series.flatMap((s) => [...(s.low || []), ...(s.high || []), ...s.y]).filter(usable);
  if (!xs.length || !band.length) {
    view.plot.replaceChildren(U.el("p", { class: "note" }, "No finite value was logged."));
    return;
  }
  let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
  let [y0, y1] = [Math.min(...band), Math.max(...band)];
  if (zero) y0 = Math.min(0, y0);
  if (y0 === y1) [y0, y1] = log ? [y0 / 2, y1 * 2] : [y0 - Math.abs(y0 || 1) / 10, y1 + Math.abs(y1 || 1) / 10];
  if (log) [y0, y1] = [y0 / (y1 / y0) ** 0.04, y1 * (y1 / y0) ** 0.04];
  else { const pad = (y1 - y0) * 0.05; y1 += pad; if (!zero || y0 < 0) y0 -= pad; }
  const X = (v) => L + ((v - x0) / (x1 - x0)) * (W - L - R);
  const share = log ? (v) => Math.log(v / y0) / Math.log(y1 / y0) : (v) => (v - y0) / (y1 - y0);
  const Y = (v) => H - B - share(v) * (H - T - B);
  const svg = U.svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img" });
  for (const tick of log ? U.logTicks(y0, y1) : U.ticks(y0, y1, 5)) {
    svg.append(U.svg("line", { class: "grid", x1: L, x2: W - R, y1: Y(tick), y2: Y(tick) }));
    svg.append(U.svg("text", { x: L - 8, y: Y(tick) + 4, "text-anchor": "end" }, U.number(tick, 3)));
  }
  for (const tick of U.ticks(x0, x1, W > 800 ? 12 : 6))
    svg.append(U.svg("text", { x: X(tick), y: H - B + 18, "text-anchor": "middle" }, U.number(tick, 6)));
  svg.append(U.svg("line", { class: "axis", x1: L, x2: W - R, y1: H - B, y2: H - B }));
  svg.append(U.svg("text", { x: (L + W - R) / 2, y: H - 5, "text-anchor": "middle" }, xLabel));
  for (const s of series) {
    if (s.low && s.low.some((v, i) => v !== s.high[i])) {
      const ok = s.x.map((_, i) => i).filter((i) => usable(s.low[i]) && usable(s.high[i]));
      const there = ok.map((i) => `${X(s.x[i]).toFixed(1)},${Y(s.high[i]).toFixed(1)}`);
      const back = ok.reverse().map((i) => `${X(s.x[i]).toFixed(1)},${Y(s.low[i]).toFixed(1)}`);
      svg.append(U.svg("polygon", { class: "band", points: [...there, ...back].join(" "), fill: s.color }));
    }
    let path = "", pen = "M";
    s.x.forEach((x, i) => {
      if (!usable(s.y[i])) { pen = "M"; return; }
      path += `${pen}${X(x).toFixed(1)},${Y(s.y[i]).toFixed(1)}`;
      pen = "L";
    });
    svg.append(U.svg("path", { class: "curve", d: path, stroke: s.color, "stroke-dasharray": s.dash || null }));
    if (s.x.length === 1 && usable(s.y[0]))
      svg.append(U.svg("circle", { cx: X(s.x[0]), cy: Y(s.y[0]), r: 3.5, fill: s.color }));
  }
  const cursor = U.svg("g", {});
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = x0 + (((event.clientX - box.left) / box.width) * W - L) / (W - L - R) * (x1 - x0);
    const lines = [];
    cursor.replaceChildren();
    for (const s of series) {
      if (!s.x.length) continue;
      let near = 0;
      s.x.forEach((x, i) => { if (Math.abs(x - at) < Math.abs(s.x[near] - at)) near = i; });
      if (!lines.length) {
        lines.push(U.el("em", {}, `${xLabel} ${U.number(s.x[near], 6)}`));
        cursor.append(U.svg("line", { class: "cursor", x1: X(s.x[near]), x2: X(s.x[near]), y1: T, y2: H - B }));
      }
      if (usable(s.y[near]))
        cursor.append(U.svg("circle", { cx: X(s.x[near]), cy: Y(s.y[near]), r: 3.5, fill: s.color }));
      const spread = s.low && s.low[near] !== s.high[near]
        ? ` (${U.number(s.low[near])} … ${U.number(s.high[near])})` : "";
      lines.push(U.el("span", {}, U.key(`${s.label} ${U.number(s.y[near])}${spread}`, s.color, true, s.dash)));
    }
    view.show(event, lines);
  });
  svg.addEventListener("pointerleave", () => { cursor.replaceChildren(); view.hide(); });
  view.plot.replaceChildren(svg);
  view.legend.replaceChildren(
    ...(series.length > 1 ? series.map((s) => U.key(s.label, s.color, true, s.dash)) : []));
};

// One stacked bar a row: rows [{label, parts: [seconds], right}], kinds [{label, color}].
U.bars = (view, { rows, kinds }) => {
  const [W, row, L, R] = [1060, rows.length > 16 ? 20 : 30, 76, 150];
  const H = rows.length * row + 34;
  const longest = Math.max(...rows.map((r) => r.parts.reduce((a, b) => a + b, 0)), 1e-12);
  const X = (v) => L + (v / longest) * (W - L - R);
  const svg = U.svg("svg", { class: "long", viewBox: `0 0 ${W} ${H}`, role: "img" });
  for (const tick of U.ticks(0, longest, 8)) {
    svg.append(U.svg("line", { class: "grid", x1: X(tick), x2: X(tick), y1: 0, y2: H - 28 }));
    svg.append(U.svg("text", { x: X(tick), y: H - 11, "text-anchor": "middle" }, tick ? U.time(tick) : "0"));
  }
  rows.forEach((r, i) => {
    const [y, h] = [i * row + row * 0.16, row * 0.68];
    svg.append(U.svg("text", { class: "strong", x: L - 10, y: y + h / 2 + 4, "text-anchor": "end" }, r.label));
    let at = 0;
    r.parts.forEach((value, k) => {
      const width = X(at + value) - X(at);
      if (width > 0) svg.append(U.svg("rect", {
        x: X(at), y, width, height: h, fill: kinds[k].color,
        onpointermove: (event) => view.show(event, [`${r.label}: ${kinds[k].label} ${U.time(value)}`]),
        onpointerleave: view.hide,
      }));
      at += value;
    });
    svg.append(U.svg("text", { x: X(at) + 10, y: y + h / 2 + 4 }, r.right));
  });
  view.plot.replaceChildren(svg);
  view.legend.replaceChildren(...kinds.map((kind) => U.key(kind.label, kind.color)));
};

// Lanes of ranks between two moments: spans above, collectives below, what they waited hatched.
U.timeline = (view, { lanes, begin, end, full, onzoom }) => {
  const [W, L, R, lane, T] = [1060, 76, 14, lanes.length > 16 ? 26 : 46, 22];
  const H = T + lanes.length * lane + 26;
  const X = (t) => L + ((t - begin) / (end - begin)) * (W - L - R);
  const names = (kind) => [...new Set(lanes.flatMap((l) => l[kind].map((e) => e.name)))];
  const [spans, ops] = [names("spans"), names("events")];
  const tint = (name) => U.color(spans.indexOf(name));
  const shade = (name) => U.color(spans.length + ops.indexOf(name) + (spans.length ? 0 : 1));
  const svg = U.svg("svg", { class: "long", viewBox: `0 0 ${W} ${H}`, role: "img", style: "touch-action:none;cursor:grab" });
  const clip = `inside${U.figures}-${Math.round(Math.random() * 1e9)}`;
  svg.append(U.svg("defs", {},
    U.svg("clipPath", { id: clip }, U.svg("rect", { x: L, y: 0, width: W - L - R, height: H })),
    U.svg("pattern", { id: `${clip}h`, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      U.svg("line", { x1: 0, y1: 0, x2: 0, y2: 5, stroke: "var(--card)", "stroke-width": 2.4, opacity: 0.75 }))));
  for (const tick of U.ticks(0, end - begin, 9)) {
    svg.append(U.svg("line", { class: "grid", x1: X(begin + tick), x2: X(begin + tick), y1: T - 6, y2: H - 24 }));
    svg.append(U.svg("text", { x: X(begin + tick), y: 11, "text-anchor": "middle" }, tick ? U.time(tick) : "0"));
  }
  const inside = U.svg("g", { "clip-path": `url(#${clip})` });
  const bar = (e, y, h, fill, lines, hatched) => {
    const [a, b] = [Math.max(X(e.begin), L - 2), Math.min(X(e.end), W)];
    if (b < L || a > W - R) return;
    const shape = { x: a, y, width: Math.max(b - a, 1), height: h, rx: 1.5 };
    const hover = { onpointermove: (event) => view.show(event, lines), onpointerleave: view.hide };
    inside.append(U.svg("rect", { ...shape, fill, ...hover }));
    if (hatched > 0) {
      const from = Math.max(X(e.end - Math.min(hatched, e.end - e.begin)), a);
      inside.append(U.svg("rect", { ...shape, x: from, width: Math.max(b - from, 0), fill: `url(#${clip}h)`, ...hover }));
    }
    if (b - a > 7 * e.name.length + 8 && h > 11 && !(hatched > 0.4 * (e.end - e.begin)))
      inside.append(U.svg("text", { class: "on", x: a + 6, y: y + h / 2 + 4, style: "pointer-events:none" }, e.name));
  };
  lanes.forEach((l, i) => {
    const y = T + i * lane;
    svg.append(U.svg("text", { class: "strong", x: L - 10, y: y + lane / 2 + 2, "text-anchor": "end" }, `rank ${l.rank}`));
    svg.append(U.svg("line", { class: "grid", x1: L, x2: W - R, y1: y + lane - 3, y2: y + lane - 3 }));
    const half = (lane - 8) / 2;
    for (const e of l.spans)
      bar(e, y, spans.length && ops.length ? half : lane - 8, tint(e.name), [`rank ${l.rank}: ${e.name}`, U.time(e.end - e.begin)], 0);
    for (const e of l.events)
      bar(e, spans.length ? y + half + 1 : y, spans.length ? half : lane - 8, shade(e.name), [
        `rank ${l.rank}: ${e.name}${e.async ? " (asynchronous)" : ""}`,
        `${U.time(e.end - e.begin)}, of which ${U.time(e.wait)} waiting`,
        U.el("em", {}, `${U.bytes(e.bytes)} ${e.site ? "· " + e.site : ""}`)], e.wait);
  });
  svg.append(inside);
  svg.append(U.svg("text", { x: (L + W - R) / 2, y: H - 6, "text-anchor": "middle" },
    `${U.time(end - begin)} shown · wheel zooms, drag moves, double click shows all`));
  const place = (event) => {
    const box = svg.getBoundingClientRect();
    return begin + ((((event.clientX - box.left) / box.width) * W - L) / (W - L - R)) * (end - begin);
  };
  const to = (a, b) => {
    const width = Math.min(Math.max(b - a, 2e-6), full[1] - full[0]);
    const from = Math.min(Math.max(a, full[0]), full[1] - width);
    onzoom(from, from + width);
  };
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const [at, factor] = [place(event), event.deltaY > 0 ? 1.25 : 0.8];
    to(at - (at - begin) * factor, at + (end - at) * factor);
  }, { passive: false });
  svg.addEventListener("pointerdown", (event) => {
    const [grabbed, a, b] = [place(event), begin, end];
    const move = (e) => { const by = grabbed - place(e); if (by) to(a + by, b + by); };
    addEventListener("pointerup", () => removeEventListener("pointermove", move), { once: true });
    addEventListener("pointermove", move);
  });
  svg.addEventListener("dblclick", () => onzoom(full[0], full[1]));
  view.plot.replaceChildren(svg);
  view.legend.replaceChildren(...spans.map((n) => U.key(n, tint(n))), ...ops.map((n) => U.key(n, shade(n))));
};

U.table = (head, rows, numeric) => U.el("div", { class: "scroll" }, U.el("table", {},
  U.el("tr", {}, head.map((h, i) => U.el("th", { class: numeric[i] ? "n" : null }, h))),
  rows.map((row) => U.el("tr", {}, row.map((c, i) => U.el("td", { class: numeric[i] ? "n" : null }, c))))));
U.theme = () => U.el("button", { title: "light or dark", onclick: () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
} }, "◐");
U.tile = (value, label) => U.el("div", { class: "tile" }, U.el("b", {}, value), U.el("span", {}, label));
