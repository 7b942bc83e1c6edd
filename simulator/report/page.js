"use strict";
// The page's numbers come from two places: what Python computed, and the formulas under
// "Costs", which the sliders feed.  The formulas mirror simulator.ratios.speedup_at and
// simulator.formulas.leviathan; tests hold both against each other to the displayed digit.  Drawing is in charts.js and maps.js.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const { add, SHAPES, looks, rowsPlot, linesPlot, shade, legible, number, digits, times, GREY } = charts;
  const LOOKS = looks(data.colours);

  // ---- Costs ------------------------------------------------------------------------------

  // Speedup of recorded rounds at cost ratio c and verification v, from their sums over prompts
  // (simulator.ratios.RatioSums), in target passes.
  function recorded(sums, c, v) {
    const [, plain, forwards, rest, verified] = sums;
    return plain / (forwards * c + verified * v + rest);
  }

  // The largest c at which rounds still give a speedup, 0 if they do not even with free drafts, and its
  // 95% interval: that of a ratio of sums over prompts, from simulator.ratios.RatioSums.
  function breakEven(sums, v) {
    const [n, plain, forwards, rest, verified, gg, gv, gf, vv, vf, ff] = sums;
    const left = plain - rest - v * verified;
    if (forwards === 0) return { ratio: left >= 0 ? Infinity : 0, low: NaN, high: NaN };
    const ratio = left / forwards;
    const squares = gg + v * v * vv + ratio * ratio * ff - 2 * v * gv - 2 * ratio * gf + 2 * v * ratio * vf;
    const error = n < 2 ? NaN : Math.sqrt((Math.max(squares, 0) * n) / (n - 1)) / forwards;
    const low = ratio - data.about.reach * error, high = ratio + data.about.reach * error;
    return { ratio: Math.max(0, ratio), low: Math.max(0, low), high: Math.max(0, high) };
  }
  const evenText = (even) => (!Number.isFinite(even.ratio) ? "–" : even.ratio > 0 ? digits(even.ratio) : "never");
  const spanText = (even) => (even.high > 0 && Number.isFinite(even.high) ? `${digits(even.low)} – ${digits(even.high)}` : "–");

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
    if (cost <= 1 || cost > gamma + 1) return NaN;
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
    return i < 0 ? NaN : recorded(data.tilt.rounds[i][gammaIndex], c, v);
  }

  // ---- What does not move -----------------------------------------------------------------

  // Plots have room for little beside a name; the tables say the rest.
  const fullName = (p) => p.name + ((p.note || "").split("; ").includes("best fixed") ? " (best fixed)" : "");

  // Bounds, which nobody can run, above the policies; approximate rows below (simulator.plots.recording).
  const KINDS = [
    { shape: "diamond", style: { fill: GREY }, stroke: GREY },
    { shape: "circle", style: { fill: data.colours[0] }, stroke: data.colours[0] },
    { shape: "square", style: { fill: "var(--paper)", stroke: data.colours[1], "stroke-width": 2 }, stroke: data.colours[1] },
  ];
  const kindOf = (p) => (p.oracle ? 0 : p.fidelity === "approximate" ? 2 : 1);
  const byKind = (rows) => rows.map((p) => ({ ...p, kind: kindOf(p) })).sort((a, b) => a.kind - b.kind);
  // Told where there are several.
  const kindsSaid = (rows) => {
    const kinds = new Set(rows.map((p) => p.kind)), words = ["◆ a bound", "● policies", "□ approximate"];
    return kinds.size > 1 ? words.filter((_, i) => kinds.has(i)).join("   ") : "";
  };

  // The same of bars, which have no mark.
  const endsSaid = (rows) => {
    const kinds = new Set(rows.map((p) => p.kind));
    const said = [kinds.has(0) ? "first: a bound" : "", kinds.has(2) ? "last: approximate" : ""];
    return kinds.size > 1 ? said.filter(Boolean).join("; ") : "";
  };

  function drawPolicies() {
    const rows = byKind(data.policies).map((p) => ({ ...p, name: fullName(p) }));
    const ends = rows.flatMap((r) => [r.speedup, r.speedup_lo ?? r.speedup, r.speedup_hi ?? r.speedup]);
    const low = Math.min(0.9, ...ends), high = Math.max(1.1, ...ends), room = 0.03 * (high - low);
    rowsPlot(byId("plot-policies"), rows, {
      low: low - room, high: high + room, reference: 1,
      label: "speedup over no speculation (×)", key: kindsSaid(rows),
      marks: (svg, x, y, r) => {
        const { shape, style, stroke } = KINDS[r.kind];
        if (r.speedup_lo !== null) {
          add(svg, "line", { x1: x(r.speedup_lo), x2: x(r.speedup_hi), y1: y, y2: y, stroke, "stroke-width": 3 });
        }
        const mark = SHAPES[shape](svg, x(r.speedup), y, style);
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
        SHAPES.diamond(svg, x(r.predicted_s), y, { fill: "var(--paper)", stroke: data.colours[1], "stroke-width": 2 });
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
        td.style.background = value < 1 ? "" : shade(value, reach);
        td.style.color = value < 1 ? "" : legible(value, reach);
      });
    }
  }

  // ---- Tables that sort and copy -------------------------------------------------------------

  const words = (cell) => cell.textContent.trim();
  // The first figure of a cell; NaN where there is none.
  const figure = (cell) => Number.parseFloat(words(cell).replace("−", "-").replaceAll(",", ""));
  const unsorted = (table) => table.querySelectorAll("th[aria-sort]").forEach((th) => th.removeAttribute("aria-sort"));

  // Largest first, then smallest first; names in alphabetical order first.
  function sortBy(table, head, column) {
    const body = table.tBodies[0], rows = [...body.rows], at = (row) => row.cells[column];
    const numeric = rows.every((row) => words(at(row)) === "–" || Number.isFinite(figure(at(row))));
    const was = head.getAttribute("aria-sort"), first = numeric ? "descending" : "ascending";
    const now = was === first ? (numeric ? "ascending" : "descending") : first;
    const sign = now === "ascending" ? 1 : -1;
    rows.sort((a, b) => {
      if (!numeric) return sign * words(at(a)).localeCompare(words(at(b)), undefined, { numeric: true });
      const [x, y] = [figure(at(a)), figure(at(b))];
      return Number.isNaN(x) || Number.isNaN(y) ? Number.isNaN(x) - Number.isNaN(y) : sign * (x - y);
    });
    unsorted(table);
    head.setAttribute("aria-sort", now);
    body.replaceChildren(...rows);
  }

  // Tabs between cells: what spreadsheets read.
  function copied(table) {
    const line = (row) => [...row.cells].map((cell) => {
      const own = cell.cloneNode(true);
      own.querySelectorAll("button").forEach((button) => button.remove());
      return own.textContent.trim().replace(/\s+/g, " ");
    }).join("\t");
    return [...table.rows].map(line).join("\n");
  }
  async function copy(table, button) {
    const text = copied(table);
    try {
      await navigator.clipboard.writeText(text);
    } catch { // a page from a file may have no clipboard
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  }

  function addButtons() {
    const button = (kind, text, label, act) => {
      const made = document.createElement("button");
      Object.assign(made, { type: "button", className: kind, textContent: text });
      made.setAttribute("aria-label", label);
      made.addEventListener("click", () => act(made));
      return made;
    };
    for (const table of document.querySelectorAll("table")) {
      table.caption.append(button("copy", "copy", "Copy this table", (made) => copy(table, made)));
      [...table.tHead.rows[0].cells].forEach((head, column) => {
        head.append(button("sort", "↕", `Sort by ${words(head)}`, () => sortBy(table, head, column)));
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
      const shown = number(settings()[key]);
      byId("value-" + key).textContent = shown;
      byId("slider-" + key).setAttribute("aria-valuetext", shown);
    }
    const curve = data.fixed.sums.map((s) => recorded(s, c, v));
    const best = curve.indexOf(Math.max(...curve));
    byId("out-gamma").textContent = gamma;
    byId("out-alpha").textContent = alpha;
    byId("out-recorded").textContent = times(curve[g]);
    byId("out-textbook").textContent = times(textbook(alpha, gamma, c, v));
    byId("out-tilted").textContent = times(tilted(alpha, g, c, v));
    byId("out-best").textContent = curve[best] > 1 ? `γ = ${gammas[best]}: ${times(curve[best])}` : "none is faster";
    const even = breakEven(data.fixed.sums[g], v), from = breakEvenAlpha(gamma, c, v);
    byId("out-even-c").textContent = evenText(even);
    byId("out-even-span").textContent = spanText(even);
    byId("out-even-alpha").textContent = Number.isFinite(from) ? digits(from)
      : gamma * c + v <= 1 ? "any" : "never";
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

    const policies = atRatios(c, v, best);
    const apart = byKind(policies).map((p) => ({ ...p, name: fullName(p) }));
    rowsPlot(byId("plot-ratio"), apart, {
      low: 0, high: Math.max(1.1, ...policies.map((p) => p.value)) * 1.02, reference: 1,
      label: `speedup at c = ${number(c)}, v = ${number(v)} (×)`, key: endsSaid(apart),
      marks: (svg, x, y, p) => {
        add(svg, "rect", { x: x(0), y: y - 5, width: Math.max(0, x(p.value) - x(0)), height: 10, fill: p.kind && p.value < 1 ? "var(--slower)" : KINDS[p.kind].stroke });
      },
    });
    byId("table-ratio").tBodies[0].replaceChildren(...policies.map(ratioRow));
    unsorted(byId("table-ratio"));

    drawRatioMaps(c, v, gamma, alpha);
  }

  // Policies at these ratios, the fastest first.  Away from the pair's own ratios the best fixed
  // length, the `best` of all, is another one, and a policy fitted to the pair's own costs would
  // decide otherwise: it is left out.
  function atRatios(c, v, best) {
    const moved = ["c", "v"].some((key) => Number(byId("slider-" + key).value) !== data.sliders[key].start);
    const left = moved ? data.policies.filter((p) => p.fitted) : [];
    byId("ratio-note").textContent = left.length === 0 ? ""
      : `Left out: ${left.map((p) => p.name).join(", ")}, fitted to this pair's own costs, at which alone its decisions hold.`;
    const fixed = { name: `fixed:gamma=${data.fixed.gammas[best]}`, sums: data.fixed.sums[best] };
    const isBest = (p) => p.own && p.policy === fixed.name;
    const rows = !moved ? data.policies : data.policies.filter((p) => !p.fitted).map((p) => (
      { ...p, note: [isBest(p) ? "best fixed" : "", p.always].filter(Boolean).join("; ") }));
    const others = moved && !rows.some(isBest) ? [{ ...fixed, note: "best fixed" }] : [];
    return [...rows, ...others]
      .map((p) => ({ ...p, value: recorded(p.sums, c, v), even: breakEven(p.sums, v) }))
      .sort((a, b) => b.value - a.value);
  }

  function ratioRow(p) {
    const row = document.createElement("tr"), head = document.createElement("th");
    head.scope = "row";
    // A long name may break after its marks, as in the tables above.
    p.name.split(/(?<=[:,=_])/).forEach((part, i) => head.append(...(i ? [document.createElement("wbr")] : []), part));
    if (p.note) {
      const said = document.createElement("span");
      said.className = "said";
      said.textContent = p.note;
      head.append(" ", said);
    }
    row.append(head);
    for (const text of [digits(p.value), evenText(p.even), spanText(p.even)]) row.insertCell().textContent = text;
    return row;
  }

  function drawRatioMaps(c, v, gamma, alpha) {
    const stops = data.sliders.c.values.filter((x) => x > 0), gammas = data.fixed.gammas, g = gammas.indexOf(gamma);
    const cs = stops.filter((_, i) => i % 2 === 0 || i === stops.length - 1);
    maps.ratioMap(byId("map-recorded"), cs, gammas, (x, y) => recorded(data.fixed.sums[gammas.indexOf(y)], x, v), {
      even: (y) => breakEven(data.fixed.sums[gammas.indexOf(y)], v),
      yLabel: "draft length γ", yText: (y) => `γ = ${y}`, at: [c, gamma], name: "recorded",
    });
    const formula = (a) => (expectedTokens(a, gamma) - v) / gamma;
    const some = (data.tilt ? data.tilt.alphas : data.sliders.alpha.values)
      .filter((a) => Math.abs(20 * a - Math.round(20 * a)) < 1e-9);
    const sums = (a) => data.tilt.rounds[data.tilt.alphas.indexOf(a)][g];
    maps.ratioMap(byId("map-alpha"), cs, some, data.tilt ? (x, a) => tilted(a, g, x, v) : (x, a) => textbook(a, gamma, x, v), {
      even: data.tilt ? (a) => breakEven(sums(a), v) : (a) => ({ ratio: formula(a), low: NaN, high: NaN }),
      dashed: data.tilt ? formula : undefined,
      yLabel: "acceptance α", yText: (a) => `α = ${a}`, at: [c, alpha], name: "alpha",
    });
  }

  function drawBatchMaps() {
    const batch = { xLabel: "batch (sequences)", xText: (b) => `batch ${b}` };
    const lengths = data.batches, contexts = data.contexts;
    if (lengths) {
      maps.stepMap(byId("map-batches"), lengths.batches, lengths.lengths, lengths, {
        ...batch, yLabel: "draft length γ", yText: (k) => `γ = ${k}`, name: "batches",
      });
    }
    if (contexts) {
      maps.stepMap(byId("map-contexts"), contexts.batches, contexts.contexts, contexts, {
        ...batch, yLabel: "context (tokens)", yText: (n) => `context ${n}`, name: "contexts",
        words: (i, j) => `γ = ${contexts.length[i][j]}`,
      });
    }
  }

  function tiltNote(alpha) {
    const note = byId("tilt-note");
    byId("tile-tilted").hidden = !data.tilt;
    if (!data.tilt) {
      note.textContent = `This recording cannot be tilted to another α: ${data.untilted}.`;
      return;
    }
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
      : `The expected error of tilting to α = ${alpha} is about ${(100 * error[0]).toFixed(1)}%, `
        + `measured between prompt groups of this recording${error[1] ? "" : "; no shift as large was among them"}.`;
  }

  function drawAll() {
    drawPolicies();
    drawValidation();
    drawServing();
    drawBatchMaps();
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
  addButtons();
  width = document.body.clientWidth;
  drawAll();
})();
