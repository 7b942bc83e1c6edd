"use strict";
// The page's numbers come from two places: what Python computed, and the formulas under
// "Costs", which the sliders feed.  The formulas mirror simulator.ratios.price_ratios and
// simulator.formulas.leviathan; tests hold both against each other to the displayed digit.
// Drawing is in charts.js.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const { add, SHAPES, looks, rowsPlot, linesPlot, mapPlot, shade, legible, number, times, GREY } = charts;
  const LOOKS = looks(data.colours);

  // ---- Costs ------------------------------------------------------------------------------

  // Speedup of recorded rounds at cost ratio c and verification v, in target passes.
  function recorded(histogram, c, v) {
    let forwards = 0, passes = 0;
    histogram.count.forEach((count, i) => {
      forwards += count * histogram.forwards[i];
      passes += count * (histogram.drafted[i] > 0 ? v : 1);
    });
    return histogram.emitted / (forwards * c + passes);
  }

  // The largest c at which the rounds still pay; 0 where they do not even with free drafts.
  function breakEvenRatio(histogram, v) {
    let forwards = 0, passes = 0;
    histogram.count.forEach((count, i) => {
      forwards += count * histogram.forwards[i];
      passes += count * (histogram.drafted[i] > 0 ? v : 1);
    });
    if (forwards === 0) return NaN;
    return Math.max(0, (histogram.emitted - passes) / forwards);
  }

  const expectedTokens = (alpha, gamma) => {
    let sum = 0;
    for (let k = 0; k <= gamma; k++) sum += alpha ** k;
    return sum;
  };

  // Leviathan et al. 2023, Theorem 3.8, with a verification of v target passes.
  const textbook = (alpha, gamma, c, v) => expectedTokens(alpha, gamma) / (gamma * c + v);

  // The alpha at which gamma drafts cost what they bring; NaN where none does.
  function breakEvenAlpha(gamma, c, v) {
    const cost = gamma * c + v;
    if (cost < 1 || cost > gamma + 1) return NaN;
    let low = 0, high = 1;
    for (let i = 0; i < 60; i++) {
      const middle = (low + high) / 2;
      if (expectedTokens(middle, gamma) < cost) low = middle; else high = middle;
    }
    return (low + high) / 2;
  }

  // Speedup of a fixed length on the recording tilted to the alpha of this index; NaN if none.
  function tilted(alpha, gammaIndex, c, v) {
    const i = data.tilt ? data.tilt.alphas.indexOf(alpha) : -1;
    if (i < 0) return NaN;
    const [emitted, forwards, plain, verified] = data.tilt.rounds[i][gammaIndex];
    return emitted / (forwards * c + plain + verified * v);
  }

  // ---- What does not move -----------------------------------------------------------------

  function drawPolicies() {
    const rows = data.policies.map((p) => ({ name: p.policy, ...p }));
    const ends = rows.flatMap((r) => [r.speedup, r.speedup_lo ?? r.speedup, r.speedup_hi ?? r.speedup]);
    const low = Math.min(0.9, ...ends), high = Math.max(1.1, ...ends), room = 0.03 * (high - low);
    rowsPlot(byId("plot-policies"), rows, {
      low: low - room, high: high + room, reference: 1,
      label: "speedup over plain decoding (×)",
      marks: (svg, x, y, r) => {
        if (r.speedup_lo !== null) {
          add(svg, "line", { x1: x(r.speedup_lo), x2: x(r.speedup_hi), y1: y, y2: y, stroke: data.colours[0], "stroke-width": 3 });
        }
        const mark = SHAPES.circle(svg, x(r.speedup), y, { fill: data.colours[0] });
        add(mark, "title", {}, `${r.name}: ${times(r.speedup)}`);
      },
    });
  }

  function drawValidation() {
    if (!data.validation) return;
    const rows = data.validation.rows.map((r) => ({ name: r.policy + (r.forced ? ", forced" : ""), ...r }));
    rowsPlot(byId("plot-validation"), rows, {
      low: 0, high: 1.04 * Math.max(...rows.flatMap((r) => [r.predicted_s, r.measured_s])),
      label: "seconds: ● measured, ◇ predicted",
      marks: (svg, x, y, r) => {
        add(svg, "line", { x1: x(r.measured_s), x2: x(r.predicted_s), y1: y, y2: y, stroke: GREY, "stroke-width": 2 });
        SHAPES.circle(svg, x(r.measured_s), y, { fill: data.colours[0] });
        SHAPES.diamond(svg, x(r.predicted_s), y, { fill: "#fff", stroke: data.colours[1], "stroke-width": 2 });
      },
    });
  }

  function drawServing() {
    if (!data.serving) return;
    const names = [...new Set(data.serving.rows.map((r) => r.policy))];
    linesPlot(byId("plot-serving"), names.map((name, i) => ({
      name, look: LOOKS[i % LOOKS.length],
      points: data.serving.rows.filter((r) => r.policy === name)
        .map((r) => [r.throughput_tok_s, 1000 * r.tpot_s, "batch " + r.batch]),
    })), { xLabel: "throughput (tokens/s)", yLabel: "ms per output token", yLow: 0 });
  }

  function shadeTables() {
    for (const table of document.querySelectorAll("table.heat")) {
      const cells = [...table.querySelectorAll("td[data-value]")].filter((td) => td.dataset.value !== "");
      const reach = Math.max(0.05, ...cells.map((td) => Number(td.dataset.value) - 1));
      cells.forEach((td) => {
        const value = Number(td.dataset.value);
        td.style.background = value < 1 ? "#fff" : shade(value, reach);
        td.style.color = legible(value, reach);
      });
    }
  }

  // ---- What the sliders move --------------------------------------------------------------

  const KEYS = ["c", "v", "gamma", "alpha"];
  const settings = () => Object.fromEntries(
    KEYS.map((key) => [key, data.sliders[key].values[Number(byId("slider-" + key).value)]]));

  function recompute() {
    const { c, v, gamma, alpha } = settings();
    const gammas = data.fixed.gammas, g = gammas.indexOf(gamma);
    for (const key of KEYS) {
      const shown = String(settings()[key]);
      byId("value-" + key).textContent = shown;
      byId("slider-" + key).setAttribute("aria-valuetext", shown);
    }
    const curve = data.fixed.histograms.map((h) => recorded(h, c, v));
    const best = curve.indexOf(Math.max(...curve));
    byId("out-gamma").textContent = gamma;
    byId("out-alpha").textContent = alpha;
    byId("out-recorded").textContent = times(curve[g]);
    byId("out-textbook").textContent = times(textbook(alpha, gamma, c, v));
    byId("out-tilted").textContent = times(tilted(alpha, g, c, v));
    byId("out-best").textContent = curve[best] > 1 ? `γ = ${gammas[best]}: ${times(curve[best])}` : "none pays";
    const even = breakEvenRatio(data.fixed.histograms[g], v), from = breakEvenAlpha(gamma, c, v);
    byId("out-even-c").textContent = even > 0 ? even.toFixed(3) : "never";
    byId("out-even-alpha").textContent = Number.isFinite(from) ? from.toFixed(3)
      : gamma * c + v < 1 ? "any" : "never";
    tiltNote(alpha);

    const series = [
      { name: "recorded", look: LOOKS[0], points: gammas.map((x, i) => [x, curve[i]]) },
      { name: `textbook, α = ${alpha}`, look: LOOKS[1], points: gammas.map((x) => [x, textbook(alpha, x, c, v)]) },
    ];
    if (data.tilt && data.tilt.alphas.includes(alpha)) {
      series.push({ name: "tilted (approximate)", look: LOOKS[2], points: gammas.map((x, i) => [x, tilted(alpha, i, c, v)]) });
    }
    linesPlot(byId("plot-lengths"), series, {
      xLabel: "draft length γ (tokens)", yLabel: "speedup (×)", xTicks: gammas, yLow: 0,
      reference: 1, selected: gamma,
    });

    const policies = data.policies.map((p) => ({
      name: p.policy, value: recorded(p.histogram, c, v), even: breakEvenRatio(p.histogram, v),
    }));
    rowsPlot(byId("plot-ratio"), policies, {
      low: 0, high: Math.max(1.1, ...policies.map((p) => p.value)) * 1.02, reference: 1,
      label: `speedup at c = ${c}, v = ${v} (×)`,
      marks: (svg, x, y, p) => {
        add(svg, "rect", { x: x(0), y: y - 5, width: Math.max(0, x(p.value) - x(0)), height: 10, fill: p.value >= 1 ? data.colours[0] : "#b5b5b5" });
      },
    });
    byId("table-ratio").querySelectorAll("tbody tr").forEach((row, i) => {
      row.cells[1].textContent = policies[i].value.toFixed(3);
      row.cells[2].textContent = Number.isNaN(policies[i].even) ? "–"
        : policies[i].even > 0 ? policies[i].even.toFixed(3) : "never";
    });

    const cs = data.sliders.c.values.filter((_, i) => i % 2 === 0);
    mapPlot(byId("map-recorded"), cs, gammas, (x, y) => recorded(data.fixed.histograms[gammas.indexOf(y)], x, v), {
      yLabel: "draft length γ", yText: (y) => `γ = ${y}`, at: [c, gamma], name: "recorded",
    });
    const alphas = data.sliders.alpha.values.filter((a) => Math.abs(20 * a - Math.round(20 * a)) < 1e-9);
    mapPlot(byId("map-textbook"), cs, alphas, (x, y) => textbook(y, gamma, x, v), {
      yLabel: "acceptance α", yText: (y) => `α = ${y}`, at: [c, alpha], name: "textbook",
    });
  }

  function tiltNote(alpha) {
    const note = byId("tilt-note");
    byId("tile-tilted").hidden = !data.tilt;
    note.hidden = !data.tilt;
    if (!data.tilt) return;
    const i = data.tilt.alphas.indexOf(alpha);
    if (i < 0) {
      note.textContent = "No tilted recording was made for this α.";
      return;
    }
    const error = data.tilt.error[i];
    note.textContent = alpha === data.sliders.alpha.values[data.sliders.alpha.start]
      ? "This is the recording's own α: nothing is tilted."
      : error === null
      ? "The error of tilting cannot be measured on this recording: its prompts are too few or too alike."
      : `Tilting to α = ${alpha} is expected to be off by about ${(100 * error[0]).toFixed(1)} %, `
        + `measured between prompt groups of this recording${error[1] ? "" : "; no shift as large was among them"}.`;
  }

  function drawAll() {
    drawPolicies();
    drawValidation();
    drawServing();
    recompute();
  }

  byId("sliders").addEventListener("input", recompute);
  byId("reset").addEventListener("click", () => {
    for (const key of KEYS) byId("slider-" + key).value = data.sliders[key].start;
    recompute();
  });
  // Only a change of width asks for new plots; a phone's address bar changes the height.
  let width = 0, pending = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    cancelAnimationFrame(pending);
    pending = requestAnimationFrame(drawAll);
  }).observe(document.body);
  window.addEventListener("beforeprint", drawAll);
  shadeTables();
  width = document.body.clientWidth;
  drawAll();
})();
