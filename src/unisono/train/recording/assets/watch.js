"use strict";
// The page of a job that runs: asks for its state once a second.
(() => {
  const known = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  const pill = U.el("span", { class: "pill pending" }, "starting");
  const lead = U.el("p", { class: "lead" }, "");
  const tiles = U.el("div", { class: "tiles", id: "tiles" });
  const alarm = U.el("div", { id: "alarm" });
  const cards = U.el("div", { class: "cards", id: "ranks" });
  const members = U.el("p", { class: "note", id: "members" });
  const figures = U.el("div", { class: "figures", id: "metrics" });
  const empty = U.el("p", { class: "note" }, "Curves appear as soon as something is logged: unisono.train.log(loss=loss).");
  let asks = false;
  const where = U.el("button", { id: "ask", onclick: () => { asks = true; } }, "where is everyone?");
  page.append(U.el("header", {}, U.el("h1", {}, known.name, pill), U.theme(), lead), tiles, alarm,
    U.el("h2", {}, "Ranks", where), members, cards, U.el("h2", {}, "Metrics"), empty, figures);
  const views = new Map();
  const open = new Set();

  const card = (rank, state) => {
    const name = `rank-${rank.rank}`;
    const detail = (key, label, text) => {
      const id = `${name}-${key}`;
      return text ? U.el("details", { ...(open.has(id) ? { open: "" } : {}),
        ontoggle: (event) => (event.target.open ? open.add(id) : open.delete(id)) },
      U.el("summary", {}, label), U.el("pre", {}, text)) : null;
    };
    const ended = state.status !== "running";
    return U.el("div", { class: `card ${rank.state}`, id: name },
      U.el("b", {}, `rank ${rank.rank} `), U.el("span", { class: rank.state }, rank.state),
      U.el("div", { class: "where" }, [
        rank.step === null || rank.step === undefined ? null : `step ${rank.step}`,
        rank.quiet_s === null || ended || rank.quiet_s < 2 ? null : `quiet for ${U.time(rank.quiet_s)}`,
        rank.share ? `${U.percent(rank.share)} in communication` : null,
        rank.host ? `${rank.host}, ${rank.device}` : null].filter(Boolean).join(" · ")),
      rank.where && !ended ? U.el("div", { class: "place" }, U.el("code", {}, rank.where)) : null,
      detail("stack", "stack", rank.stack), detail("log", "log", rank.log), detail("trouble", "error", rank.trouble));
  };

  const draw = (state) => {
    pill.className = `pill ${state.status}`;
    pill.textContent = state.status;
    lead.textContent = `${known.ranks} rank${known.ranks === 1 ? "" : "s"}, ${U.time(state.seconds)} · ${state.directory}`;
    const rate = state.throughput.values[state.throughput.values.length - 1];
    const shares = state.ranks.map((r) => r.share).filter((s) => s !== null && s !== undefined);
    const loss = state.metrics.find((m) => /loss/i.test(m.name)) || state.metrics[0];
    tiles.replaceChildren(...[
      U.tile(U.number(state.steps, 7), "steps"),
      state.members && state.members.length ? U.tile(state.members[state.members.length - 1].members, "members") : null,
      loss ? U.tile(U.number(loss.mean[loss.mean.length - 1]), loss.name) : null,
      rate ? U.tile(U.number(rate, 3), state.throughput.unit) : null,
      shares.length ? U.tile(U.percent(shares.reduce((a, b) => a + b, 0) / shares.length), "in communication") : null,
    ].filter(Boolean));
    const stalled = state.ranks.filter((r) => r.state === "stalled" && r.where);
    const waiting = state.ranks.filter((r) => r.state === "waiting");
    const list = (some) => `rank${some.length > 1 ? "s" : ""} ${some.map((r) => r.rank).join(", ")}`;
    const verb = (words, some) => some.length > 1 ? words.replace(/^waits\b/, "wait") : words;
    alarm.replaceChildren(...(state.status === "running" && (stalled.length || waiting.length) ? [U.el("p", { class: "trouble" },
      stalled.length ? `No news from ${list(stalled)}: ${stalled[0].where}. ` : "",
      waiting.length ? `R${list(waiting).slice(1)} ${verb(waiting[0].where || "waits", waiting)}.` : "")] : []));
    const news = state.members || [];
    members.textContent = news.slice(-6).reverse()
      .map((e) => `rank ${e.rank} ${e.what} at step ${e.step} (${e.members} members)`).join(" · ");
    cards.replaceChildren(...state.ranks.map((rank) => card(rank, state)));
    empty.style.display = state.metrics.length ? "none" : "";
    const curves = state.metrics.map((m) => ({ title: m.name, series: { label: m.name, x: m.steps, y: m.mean, low: m.low, high: m.high } }));
    if (state.throughput.values.length) curves.push({ title: state.throughput.unit, zero: true,
      series: { label: state.throughput.unit, x: state.throughput.steps, y: state.throughput.values } });
    for (const curve of curves) {
      if (!views.has(curve.title)) {
        const view = U.figure({ title: curve.title, caption: curve.zero ? "All ranks together." : "Mean over ranks." });
        views.set(curve.title, view);
        figures.append(view.figure);
      }
      U.curves(views.get(curve.title), { series: [{ ...curve.series, color: U.color(0) }], xLabel: "step", zero: curve.zero });
    }
  };

  let misses = 0;
  let last = null;
  const look = async () => {
    try {
      const answer = await fetch(asks ? "state?ask" : "state", { cache: "no-store" });
      asks = false;
      last = await answer.json();
      misses = 0;
      draw(last);
    } catch {
      misses += 1;
    }
    const over = last && last.status !== "running" && last.status !== "pending" && last.status !== "requeued";
    if (over || misses > 2) {
      if (!over) { pill.className = "pill"; pill.textContent = "no longer served"; }
      lead.textContent = last ? `The run has ended. See it all: unisono report ${last.directory}` : "The run has ended.";
      return;
    }
    setTimeout(look, 1000);
  };
  look();
})();
