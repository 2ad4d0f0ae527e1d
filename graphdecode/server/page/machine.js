"use strict";
// The machine: what /live says, once a second, beside what it said before.

(() => {
  const EVERY_MS = 1000;
  const KEPT = 120;
  const history = { live: [], padded: [], step: [], floor: [] };
  let before = null;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
  const ms = (seconds) => (seconds === null ? "–" : `${(1000 * seconds).toFixed(2)} ms`);

  function keep(name, value) {
    history[name].push(value);
    if (history[name].length > KEPT) history[name].shift();
  }

  function difference(now, then) {
    return Object.fromEntries(Object.entries(now).map(([key, count]) => [key, count - ((then && then[key]) || 0)]));
  }

  function draw(id, series) {
    const canvas = byId(id);
    const pen = canvas.getContext("2d");
    const top = Math.max(...series.flatMap(({ values }) => values), 1e-9) * 1.1;
    pen.clearRect(0, 0, canvas.width, canvas.height);
    for (const { values, name, dashed } of series) {
      pen.strokeStyle = colour(name);
      pen.setLineDash(dashed ? [4, 3] : []);
      pen.lineWidth = 1.5;
      pen.beginPath();
      values.forEach((value, i) => {
        const x = (i / (KEPT - 1)) * canvas.width;
        const y = canvas.height - (value / top) * (canvas.height - 4) - 2;
        if (i) pen.lineTo(x, y);
        else pen.moveTo(x, y);
      });
      pen.stroke();
    }
  }

  function show(figures) {
    const entries = Object.entries(figures);
    byId("figures").replaceChildren(...entries.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  }

  function showBuckets(replays) {
    const max = Math.max(...Object.values(replays), 1);
    byId("buckets").replaceChildren(...Object.entries(replays).map(([bucket, value]) => (
      make("div", { class: "bar" }, make("span", {}, bucket), make("meter", { max, value }), make("span", {}, value))
    )));
  }

  async function look() {
    try {
      const live = await (await fetch("live")).json();
      const seconds = before ? live.time - before.time : 0;
      const replays = difference(live.bucket_steps, before && before.bucket_steps);
      const steps = Object.values(replays).reduce((sum, count) => sum + count, 0);
      const rows = Object.entries(difference(live.batch_sizes, before && before.batch_sizes)).reduce((sum, [size, count]) => sum + size * count, 0);
      const computed = Object.entries(replays).reduce((sum, [bucket, count]) => sum + bucket * count, 0);
      const tokens = before ? live.generated_tokens - before.generated_tokens : 0;
      if (before) {
        keep("live", steps ? rows / steps : 0);
        keep("padded", steps ? computed / steps : 0);
        keep("step", live.step_seconds || 0);
        keep("floor", live.floor_seconds || 0);
        showBuckets(replays);
        draw("rows", [{ values: history.padded, name: "--quiet", dashed: true }, { values: history.live, name: "--accent" }]);
        const floor = live.floor_seconds === null ? [] : [{ values: history.floor, name: "--quiet", dashed: true }];
        draw("steps", [...floor, { values: history.step, name: "--accent" }]);
      }
      show({
        "running / waiting": `${live.running} / ${live.waiting}`,
        "tokens/s": seconds ? Math.round(tokens / seconds) : "–",
        "first token (median)": ms(live.first_token_seconds),
        "step (median)": ms(live.step_seconds),
        ...(live.floor_seconds === null ? {} : { "floor: reading the weights": ms(live.floor_seconds) }),
        "rows, live of computed": steps ? `${(rows / steps).toFixed(1)} of ${(computed / steps).toFixed(1)}` : "–",
        "pages used": `${live.used_pages} of ${live.total_pages}`,
        "preemptions": live.preemptions,
      });
      before = live;
    } catch {
      show({ "the server": "does not answer" });
      before = null;
    }
    setTimeout(look, EVERY_MS);
  }
  look();
})();
