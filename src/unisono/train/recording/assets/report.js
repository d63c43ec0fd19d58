"use strict";
// The page of one run.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  const other = data.against;
  const last = (curve) => curve.mean[curve.mean.length - 1];
  const meanShare = (shares) => shares.reduce((sum, row) => sum + row.share, 0) / shares.length;
  const ranks = (n) => `${n} rank${n === 1 ? "" : "s"}`;
  const section = (id, title, note) => {
    const box = U.el("section", { id }, U.el("h2", {}, title), note ? U.el("p", { class: "note" }, note) : null);
    page.append(box);
    return box;
  };

  if (data.comparison.forms) {
    compared(data.comparison);
    return;
  }

  page.append(U.el("header", {},
    U.el("h1", {}, data.name, U.el("span", { class: `pill ${data.status}` }, data.status)), U.theme(),
    U.el("p", { class: "lead" }, `${ranks(data.ranks)}, ${U.time(data.seconds)}, ${data.attempts > 1 ? `${data.attempts} attempts, ` : ""}${data.started.replace("T", " ").replace("+00:00", " UTC")}`)));
  if (data.trouble) page.append(U.el("p", { class: "trouble" }, data.trouble));

  const tiles = U.el("div", { class: "tiles", id: "tiles" });
  const loss = data.metrics.find((m) => /loss|nll|error/i.test(m.name)) || data.metrics[0];
  if (loss) tiles.append(U.tile(U.number(last(loss), 3), `last ${loss.name}`));
  for (const m of data.metrics.filter((m) => m !== loss && /acc|score|r2|iou/i.test(m.name)).slice(0, 1))
    tiles.append(U.tile(U.number(last(m)), `last ${m.name}`));
  if (data.rate) tiles.append(U.tile(U.number(data.rate, 3), data.throughput.unit));
  const alone = other.find((run) => run.rate && run.throughput.unit === data.throughput.unit);
  if (alone && data.rate) tiles.append(U.tile(`${(data.rate / alone.rate).toFixed(2)} ×`, `speed-up over ${ranks(alone.ranks)}`));
  if (data.shares.length) tiles.append(U.tile(U.percent(meanShare(data.shares)), "in communication"));
  tiles.append(U.tile(String(data.ranks), data.steps ? `ranks, ${U.number(data.steps, 7)} steps` : "ranks"));
  page.append(tiles);

  // What `unisono compare` has found: the difference by step, and the modules by their first one.
  function compared({ text, forms }) {
    page.append(U.el("header", {}, U.el("h1", {}, data.name), U.theme(),
      U.el("p", { class: "lead" }, data.started.replace("T", " ").replace("+00:00", " UTC"))));
    section("found", "What differs first").append(U.el("pre", { class: "log" }, text));
    for (const form of forms) {
      const box = section(`ranks-${form.ranks}`, `${ranks(form.ranks)}: ${form.cause}`);
      const curves = Object.entries(form.curves);
      if (curves.length) {
        const view = U.figure({ title: "relative difference", wide: true,
          caption: "The largest relative difference from the first form in each step. No point: no difference." });
        U.curves(view, { xLabel: "step", log: true, width: 1060, series: curves.map(([label, y], i) => ({
          label, color: U.color(i), x: y.map((_, step) => step), y: y.map((v) => (v > 0 ? v : null)) })) });
        box.append(U.el("div", { class: "figures" }, view.figure));
      }
      const tree = U.el("div", { class: "tree" });
      for (const { name, kind, step } of form.modules) {
        const depth = name ? name.split(".").length : 0;
        const strength = step === 0 ? 80 : Math.round(45 - (25 * (step || 0)) / form.steps);
        const said = step === null ? "equal up to rounding" : `differs from step ${step} on`;
        tree.append(U.el("div", { style: `margin-left: ${2 * depth}em` },
          U.el("span", { class: step === null ? "equal" : "differs", style: `--strength: ${strength}%` }, `${name || "model"} (${kind})`), ` ${said}`));
      }
      box.append(tree);
    }
  }

  // Curves of everything that was logged.
  const metrics = section("metrics", "Metrics",
    data.ranks > 1 ? "Means over ranks; the band reaches from the smallest to the largest rank." : null);
  const figures = U.el("div", { class: "figures" });
  metrics.append(figures);
  const single = data.metrics.length === 1;
  for (const metric of data.metrics) {
    const rivals = other.map((run) => ({ run, curve: run.metrics.find((m) => m.name === metric.name) })).filter((r) => r.curve);
    const state = { x: "steps", log: false };
    const draw = () => {
      const one = (curve, label, color, dash) => ({
        label, color, dash, x: curve[state.x], y: curve.mean, low: dash ? null : curve.low, high: dash ? null : curve.high });
      U.curves(view, {
        series: [one(metric, rivals.length ? `${data.name} (${ranks(data.ranks)})` : metric.name, U.color(0)),
          ...rivals.map((r, i) => one(r.curve, `${r.run.name} (${ranks(r.run.ranks)})`, U.color(i + 1), "6 4"))],
        xLabel: state.x === "steps" ? "step" : "seconds", log: state.log, width: single ? 1060 : 520 });
    };
    const toggle = (text, name, on) => U.el("button", { "aria-pressed": "false", onclick: (event) => {
      state[name] = name === "x" ? (state.x === "steps" ? "seconds" : "steps") : !state.log;
      event.target.setAttribute("aria-pressed", String(state[name] === on));
      draw();
    } }, text);
    const gaps = metric.mean.filter((v) => v === null).length;
    const apart = rivals.length ? difference(metric, rivals[0].curve) : null;
    const caption = [`${metric.name} of ${ranks(data.ranks)}`,
      rivals.length ? `, dashed: ${rivals.map((r) => `${r.run.name} (${ranks(r.run.ranks)})`).join(", ")}` : "",
      apart === null ? "" : apart === 0 ? "; the curves are equal" : `; the curves differ by at most ${U.number(apart, 2)}`,
      gaps ? `; ${gaps} points are not finite` : "", "."].join("");
    const view = U.figure({ title: metric.name, caption, wide: single, tools: [toggle("time", "x", "seconds"), toggle("log", "log", true)] });
    draw();
    figures.append(view.figure);
  }
  if (!data.metrics.length) figures.append(U.el("p", { class: "note" },
    "Nothing was logged. unisono.train.log(loss=loss) in the training loop draws curves here."));
  function difference(a, b) {
    const there = new Map(b.steps.map((step, i) => [step, b.mean[i]]));
    const gaps = a.steps.map((step, i) => Math.abs(a.mean[i] - there.get(step))).filter((v) => !Number.isNaN(v));
    return gaps.length ? Math.max(...gaps) : null;
  }

  // Throughput.
  const speed = section("throughput", "Throughput");
  if (data.throughput.values.length) {
    const box = U.el("div", { class: "figures" });
    speed.append(box);
    const rivals = other.filter((run) => run.throughput.unit === data.throughput.unit && run.throughput.values.length);
    const view = U.figure({ title: data.throughput.unit, wide: !rivals.length,
      caption: `${data.throughput.unit === "steps/s" ? "Steps" : "Samples of all ranks"} a second${data.rate ? `, ${U.number(data.rate, 3)} over the whole run` : ""}.` });
    const one = (run, color, dash) => ({ label: `${run.name} (${ranks(run.ranks)})`, x: run.throughput.steps, y: run.throughput.values, color, dash });
    U.curves(view, { series: [one(data, U.color(0)), ...rivals.map((run, i) => one(run, U.color(i + 1), "6 4"))],
      xLabel: "step", zero: true, width: rivals.length ? 520 : 1060, height: rivals.length ? 260 : 220 });
    box.append(view.figure);
    if (rivals.length) {
      const runs = [...rivals, data];
      box.append(U.el("figure", { class: "short" }, U.el("div", { class: "tools" }, U.el("span", { class: "title" }, "Compared")),
        U.table(["run", "ranks", "threads", data.throughput.unit, "speed-up", "in communication"],
          runs.map((run) => [run.name, String(run.ranks), `${run.threads} each`, U.number(run.rate, 4), `${(run.rate / rivals[0].rate).toFixed(2)} ×`,
            run.shares.length ? U.percent(meanShare(run.shares)) : "–"]), [0, 1, 1, 1, 1, 1]),
        U.el("figcaption", {}, `Speed-up over ${rivals[0].name}.`)));
    }
  } else speed.append(U.el("p", { class: "note" }, "No steps were counted: unisono.train.log(samples=len(batch)) counts them."));

  // Communication.
  const comm = section("communication", "Communication",
    "Seconds each rank spent computing, moving data, and waiting for other ranks to arrive.");
  if (data.shares.length) {
    const view = U.figure({ title: "Where the time went", wide: true, id: "shares",
      caption: `On average ${U.percent(meanShare(data.shares))} of the time is spent in communication. The rank that waits least is the one the others wait for.${data.shares.length > 64 ? " The first 64 ranks are drawn." : ""}` });
    U.bars(view, {
      rows: data.shares.slice(0, 64).map((row) => ({ label: `rank ${row.rank}`, parts: [row.compute, row.move, row.wait], right: `${U.percent(row.share)} in communication` })),
      kinds: [{ label: "computing", color: "var(--compute)" }, { label: "moving data", color: "var(--move)" }, { label: "waiting for others", color: "var(--wait)" }] });
    comm.append(U.el("div", { class: "figures" }, view.figure));
  }
  if (data.calls.length) comm.append(U.el("div", { class: "figures" }, U.el("figure", { class: "wide" },
    U.table(["collective", "called at", "calls", "data", "time", "waiting"],
      data.calls.map((c) => [c.op, c.site || "–", U.number(c.calls, 7), U.bytes(c.bytes), U.time(c.seconds), U.time(c.wait)]), [0, 0, 1, 1, 1, 1]),
    U.el("figcaption", {}, "Collectives of all ranks together, slowest first."))));
  else comm.append(U.el("p", { class: "note" }, "No collective was called through unisono."));

  if (data.averaging.length) comm.append(U.el("div", { class: "figures" }, U.el("figure", { class: "wide", id: "averaging" },
    U.el("div", { class: "tools" }, U.el("span", { class: "title" }, "Averaged gradients")),
    U.table(["rank", "module", "over", "steps", "buckets", "data a step", "waited in backward", "and in forward", "share of the run"],
      data.averaging.slice(0, 64).map((a) => [String(a.rank), a.module, ranks(a.ranks), U.number(a.steps, 7), String(a.buckets), U.bytes(a.bytes_per_step),
        U.time(a.backward_s_per_step), U.time(a.forward_s_per_step), `${U.percent(a.backward_share)} + ${U.percent(a.forward_share)}`]), [0, 0, 0, 1, 1, 1, 1, 1, 1]),
    U.el("figcaption", {}, `What DataParallel cost each rank: waits of an average step in backward and in forward (or wherever gradients were needed later), and both as shares of the rank's time, start-up included.${data.averaging.length > 64 ? " The first 64 rows are shown." : ""}`))));

  // One step, lanes of ranks.
  const steps = section("timeline", "One step");
  if (data.timeline) {
    const lines = data.timeline;
    const full = [lines.steps[0].begin, lines.steps[lines.steps.length - 1].end];
    let at = lines.shown;
    const name = U.el("span", { class: "lead" });
    const draw = (begin, end) => U.timeline(view, { lanes: lines.lanes, begin, end, full, onzoom: draw });
    const go = (by) => {
      at = Math.min(Math.max(at + by, 0), lines.steps.length - 1);
      const step = lines.steps[at];
      name.textContent = step.number === null ? "the whole run" : `step ${step.number}, ${U.time(step.end - step.begin)}`;
      draw(step.begin, step.end);
    };
    const view = U.figure({ title: "Timeline", wide: true,
      tools: [name, U.el("button", { onclick: () => go(-1) }, "‹ earlier"), U.el("button", { onclick: () => go(1) }, "later ›"),
        U.el("button", { onclick: () => draw(full[0], full[1]) }, "all")],
      caption: `One lane a rank on a common clock: spans of the program above, collectives below; what is hatched is waiting.${data.ranks > lines.lanes.length ? ` The first ${lines.lanes.length} ranks are drawn.` : ""} trace.json beside this page shows more of it at ui.perfetto.dev.` });
    go(0);
    steps.append(U.el("div", { class: "figures" }, view.figure));
  } else steps.append(U.el("p", { class: "note" }, "Neither a collective nor a span was recorded."));

  // Ranks.
  section("ranks", "Ranks").append(U.el("figure", { class: "wide" },
    U.table(["rank", "host", "device", "threads", "peak memory", "ended"],
      data.places.slice(0, 64).map((p) => [String(p.rank), p.host, p.device, String(p.threads),
        p.peak_mb ? `${U.number(p.peak_mb, 4)} MB` : "–", p.status]), [0, 0, 0, 1, 1, 0])));

  // Machine, versions, settings.
  const facts = section("facts", "Machine and versions");
  const tables = U.el("div", { class: "facts" });
  facts.append(tables);
  for (const [title, rows] of Object.entries(data.facts)) if (Object.keys(rows).length)
    tables.append(U.el("figure", {}, U.el("h3", {}, title), U.el("table", {},
      Object.entries(rows).map(([key, value]) => U.el("tr", {}, U.el("th", {}, key), U.el("td", {}, value))))));

  // Logs.
  const logs = section("logs", "Logs", "The end of what each rank printed; the files beside this page have all of it.");
  for (const log of data.logs) {
    const lines = log.text ? log.text.split("\n").length : 0;
    logs.append(U.el("details", log.rank === 0 ? { open: "" } : {},
      U.el("summary", {}, `rank ${log.rank} `, U.el("span", {}, lines ? `${lines} line${lines === 1 ? "" : "s"}` : "printed nothing")),
      lines ? U.el("pre", {}, log.text) : null));
  }
  page.append(U.el("footer", {}, `unisono ${data.facts.Versions.unisono || ""} · ${data.command}`));
})();
