"use strict";
// Small SVG charts, drawn to the width of their place so that text keeps its size on a narrow
// screen.  Series differ by colour, dash and marker.  Maps are in maps.js.
const charts = (() => {
  // Colours of the page, which has a light and a dark mode (page.css).
  const INK = "var(--ink)", GREY = "var(--grey)", FAINT = "var(--grid)";
  const DARK = "#222"; // on shaded cells, which are light in both modes
  const NS = "http://www.w3.org/2000/svg";
  function add(parent, name, attributes, text) {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }

  // An empty SVG as wide as its place, so that text keeps its size on a narrow screen.
  function canvas(place, height) {
    const width = Math.max(place.clientWidth, 240);
    place.replaceChildren();
    const svg = add(place, "svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
    return { svg, width, height };
  }

  const number = (x) => (Number.isFinite(x) ? String(Number(x.toPrecision(3))) : "–");
  // Three significant digits, as traces.digits.three_digits.
  const digits = (x) => {
    const size = Math.abs(x);
    if (size >= 99.95) return x.toFixed(0);
    if (size > 0 && size < 0.0995) return x.toPrecision(3);
    return x.toFixed(size >= 9.995 ? 1 : size >= 0.9995 ? 2 : 3);
  };
  const times = (x) => (Number.isFinite(x) ? digits(x) + "×" : "–");

  // About `count` round numbers between low and high.
  function ticks(low, high, count) {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
    const found = [];
    for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + 1e-9; t += step) found.push(t);
    return found;
  }

  function shorten(text, room) {
    const letters = Math.max(6, Math.floor(room / 6.4));
    return text.length <= letters ? text : text.slice(0, letters - 1) + "…";
  }

  // Rows of a value with an interval, sharing one axis; `marks` draws each row's own symbols.
  // `key` is a second line below, about the kinds of rows.
  function rowsPlot(place, rows, { low, high, label, key, reference, marks }) {
    const narrow = place.clientWidth < 520;
    const step = narrow ? 38 : 24, top = 8, bottom = key ? 58 : 40;
    const { svg, width } = canvas(place, top + rows.length * step + bottom);
    const left = narrow ? 6 : Math.min(270, width * 0.36), right = width - 16;
    const base = top + rows.length * step;
    const x = (v) => left + ((v - low) / (high - low)) * (right - left);
    for (const t of ticks(low, high, narrow ? 4 : 7)) {
      add(svg, "line", { x1: x(t), x2: x(t), y1: top, y2: base, stroke: FAINT });
      add(svg, "text", { x: x(t), y: base + 15, "text-anchor": "middle" }, number(t));
    }
    if (reference !== undefined) {
      add(svg, "line", { x1: x(reference), x2: x(reference), y1: top, y2: base, stroke: INK, "stroke-width": 1.4 });
    }
    rows.forEach((row, i) => {
      // A line between kinds of row.
      if (i && row.kind !== rows[i - 1].kind) {
        add(svg, "line", { x1: 0, x2: right, y1: top + i * step, y2: top + i * step, stroke: GREY });
      }
      // On a narrow screen the name stands above its row, on a wide one beside it.
      const y = top + i * step + (narrow ? 27 : step / 2);
      if (narrow) add(svg, "text", { x: left, y: y - 10 }, shorten(row.name, right - left));
      else add(svg, "text", { x: left - 8, y: y + 4, "text-anchor": "end" }, shorten(row.name, left - 12));
      add(svg, "line", { x1: left, x2: right, y1: y, y2: y, stroke: "var(--row)" });
      marks(svg, x, y, row);
    });
    add(svg, "text", { x: (left + right) / 2, y: base + 33, "text-anchor": "middle" }, label);
    if (key) add(svg, "text", { x: (left + right) / 2, y: base + 51, "text-anchor": "middle" }, key);
  }

  const SHAPES = {
    circle: (s, x, y, o) => add(s, "circle", { cx: x, cy: y, r: 4.5, ...o }),
    square: (s, x, y, o) => add(s, "rect", { x: x - 4, y: y - 4, width: 8, height: 8, ...o }),
    triangle: (s, x, y, o) => add(s, "path", { d: `M${x} ${y - 5.5}l5 9h-10z`, ...o }),
    diamond: (s, x, y, o) => add(s, "path", { d: `M${x} ${y - 6}l6 6-6 6-6-6z`, ...o }),
    down: (s, x, y, o) => add(s, "path", { d: `M${x} ${y + 5.5}l5-9h-10z`, ...o }),
  };
  const looks = (colours) => Object.keys(SHAPES).map((shape, i) => ({
    shape, colour: colours[i], dash: ["", "7 3", "2 3", "8 3 2 3", "12 4"][i],
  }));

  // Lines over a shared pair of axes with a legend above; points are [x, y, label?].
  function linesPlot(place, series, { xLabel, yLabel, xTicks, yLow, reference, selected }) {
    const all = series.flatMap((s) => s.points).filter((p) => Number.isFinite(p[1]));
    if (!all.length) { place.replaceChildren(); return; }
    const { svg, width, height } = canvas(place, 330);
    const left = 54, right = width - 14, bottom = height - 44;
    let lx = left, ly = 12;
    series.forEach((s) => {
      const wide = 50 + 6.7 * s.name.length;
      if (lx + wide > width && lx > left) { lx = left; ly += 19; }
      add(svg, "line", { x1: lx, x2: lx + 24, y1: ly, y2: ly, stroke: s.look.colour, "stroke-width": 2, "stroke-dasharray": s.look.dash });
      SHAPES[s.look.shape](svg, lx + 12, ly, { fill: s.look.colour });
      add(svg, "text", { x: lx + 30, y: ly + 4 }, s.name);
      lx += wide;
    });
    const top = ly + 20;
    const xs = all.map((p) => p[0]), ys = all.map((p) => p[1]);
    const x0 = Math.min(...xs), x1 = Math.max(...xs), y0 = yLow, y1 = Math.max(...ys) * 1.06;
    const x = (v) => left + 8 + ((v - x0) / (x1 - x0 || 1)) * (right - left - 16);
    const y = (v) => bottom - ((v - y0) / (y1 - y0)) * (bottom - top);
    for (const t of ticks(y0, y1, 6)) {
      add(svg, "line", { x1: left, x2: right, y1: y(t), y2: y(t), stroke: FAINT });
      add(svg, "text", { x: left - 6, y: y(t) + 4, "text-anchor": "end" }, number(t));
    }
    for (const t of xTicks || ticks(Math.min(...xs), Math.max(...xs), width < 520 ? 4 : 8)) {
      add(svg, "text", { x: x(t), y: bottom + 16, "text-anchor": "middle" }, number(t));
    }
    if (selected !== undefined) {
      add(svg, "line", { x1: x(selected), x2: x(selected), y1: top, y2: bottom, stroke: GREY, "stroke-dasharray": "4 3" });
    }
    if (reference !== undefined && reference >= y0 && reference <= y1) {
      add(svg, "line", { x1: left, x2: right, y1: y(reference), y2: y(reference), stroke: INK, "stroke-width": 1.4 });
    }
    series.forEach((s) => {
      const points = s.points.filter((p) => Number.isFinite(p[1]));
      add(svg, "path", {
        d: points.map((p, i) => (i ? "L" : "M") + x(p[0]) + " " + y(p[1])).join(""),
        fill: "none", stroke: s.look.colour, "stroke-width": 2, "stroke-dasharray": s.look.dash,
      });
      points.forEach((p) => {
        const mark = SHAPES[s.look.shape](svg, x(p[0]), y(p[1]), {
          fill: s.look.colour, "data-series": s.name, "data-x": p[0], "data-y": p[1],
        });
        add(mark, "title", {}, `${s.name}: ${number(p[0])}, ${number(p[1])}${p[2] ? " (" + p[2] + ")" : ""}`);
      });
    });
    add(svg, "text", { x: (left + right) / 2, y: height - 8, "text-anchor": "middle" }, xLabel);
    add(svg, "text", { x: 12, y: (top + bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${(top + bottom) / 2})` }, yLabel);
  }

  // One hue from light to dark: order survives greyscale.  Below 1 it stays nearly white.
  function shade(value, reach) {
    const t = Math.max(0, Math.min(1, (value - 1) / (reach || 1)));
    const mix = (a, b) => Math.round(a + (b - a) * t);
    return `rgb(${mix(236, 0)},${mix(244, 73)},${mix(250, 120)})`;
  }
  const legible = (value, reach) => ((value - 1) / (reach || 1) > 0.55 ? "#fff" : DARK);

  return { add, canvas, SHAPES, looks, rowsPlot, linesPlot, shade, legible, number, digits, times, GREY, INK, DARK };
})();
