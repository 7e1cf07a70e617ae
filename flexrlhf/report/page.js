(function () {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const preference = window.matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const isTouch = window.matchMedia("(pointer: coarse)").matches;
  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: isTouch ? false : "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };
  let chosen = null;

  function colour(name) {
    return getComputedStyle(root).getPropertyValue("--" + name).trim();
  }

  /* Layout updates, by path, that give a figure the colours of the theme. */
  function themed(layout) {
    const update = {
      "font.color": colour("ink"),
      "hoverlabel.bgcolor": colour("panel"),
      "hoverlabel.bordercolor": colour("line"),
      "hoverlabel.font.color": colour("ink"),
      "modebar.color": colour("soft"),
      "modebar.activecolor": colour("accent"),
      "modebar.bgcolor": "rgba(0,0,0,0)",
    };
    for (const key of Object.keys(layout)) {
      if (/^[xy]axis\d*$/.test(key)) {
        update[key + ".gridcolor"] = colour("grid");
        update[key + ".linecolor"] = colour("line");
        update[key + ".zerolinecolor"] = colour("line");
      }
    }
    (layout.shapes || []).forEach(function (shape, index) {
      update["shapes[" + index + "].line.color"] = colour("soft");
    });
    return update;
  }

  function applyTheme() {
    const dark = chosen === null ? preference.matches : chosen === "dark";
    root.dataset.theme = dark ? "dark" : "light";
    button.textContent = dark ? "light" : "dark";
    for (const chart of document.querySelectorAll(".chart.js-plotly-plot")) {
      Plotly.relayout(chart, themed(chart.layout));
    }
  }

  function plot(chart) {
    const figure = figures[chart.id];
    if (!figure || chart.classList.contains("js-plotly-plot")) {
      return;
    }
    if (isTouch) {
      // a finger on a figure scrolls the page; buttons zoom
      figure.layout.dragmode = false;
    }
    for (const [path, value] of Object.entries(themed(figure.layout))) {
      setAt(figure.layout, path.replaceAll("[", ".").replaceAll("]", "").split("."), value);
    }
    Plotly.newPlot(chart, figure.data, figure.layout, config);
    fit(chart);
  }

  function setAt(target, path, value) {
    const last = path.pop();
    for (const key of path) {
      target = target[key] = target[key] || {};
    }
    target[last] = value;
  }

  /* Add the height of the legend, which wraps as the page is wide, to that of the figure. */
  function fit(chart) {
    const legend = chart.querySelector("g.legend rect.bg");
    const height = Number(chart.dataset.height) + (legend ? Math.ceil(legend.getBBox().height) : 0);
    if (Math.abs(height - chart.layout.height) > 2) {
      chart.style.height = height + "px";
      Plotly.relayout(chart, { height: height });
    }
    fitCells(chart);
  }

  /* Leave out the texts of cells that are too narrow for them. */
  function fitCells(chart) {
    chart.data.forEach(function (trace, index) {
      if (trace.type === "heatmap") {
        const words = figures[chart.id].texts = figures[chart.id].texts || trace.texttemplate;
        const shown = chart._fullLayout._size.w / trace.x.length < 52 ? "" : words;
        if (shown !== trace.texttemplate) {
          Plotly.restyle(chart, { texttemplate: shown }, [index]);
        }
      }
    });
  }

  let resizing = 0;
  window.addEventListener("resize", function () {
    clearTimeout(resizing);
    resizing = setTimeout(function () {
      document.querySelectorAll(".chart.js-plotly-plot").forEach(fit);
    }, 300);
  });

  /* Plot the figures of open folders one after the other, so that the first can be used while others follow. */
  const queue = [];

  function plotVisible(folder) {
    const isIdle = queue.length === 0;
    for (const chart of folder.querySelectorAll(".chart:not(.js-plotly-plot)")) {
      if (chart.offsetParent !== null && !queue.includes(chart)) {
        queue.push(chart);
      }
    }
    root.dataset.ready = String(queue.length === 0);
    if (isIdle) {
      plotNext();
    }
  }

  function plotNext() {
    if (queue.length > 0) {
      plot(queue[0]);
      queue.shift();
      root.dataset.ready = String(queue.length === 0);
      setTimeout(plotNext, 0);
    }
  }

  function move(chart, target) {
    let [start, end] = chart.layout.xaxis.range.map(Number);
    const width = end - start;
    const data = target.dataset;
    if (data.start !== undefined) {
      [start, end] = [Number(data.start), Number(data.end)];
    } else if (data.shift !== undefined) {
      [start, end] = [start + data.shift * width, end + data.shift * width];
    } else {
      const centre = (start + end) / 2;
      [start, end] = [centre - (width * data.zoom) / 2, centre + (width * data.zoom) / 2];
    }
    const update = {};
    for (const key of Object.keys(chart.layout)) {
      if (/^xaxis\d*$/.test(key)) {
        update[key + ".range"] = [start, end];
      }
    }
    Plotly.relayout(chart, update);
  }

  for (const views of document.querySelectorAll(".views")) {
    views.addEventListener("click", function (event) {
      if (event.target.tagName === "BUTTON") {
        move(document.getElementById(views.dataset.figure), event.target);
      }
    });
  }
  for (const folder of document.querySelectorAll("details")) {
    folder.addEventListener("toggle", function () {
      if (folder.open) {
        plotVisible(folder);
      }
    });
  }
  button.addEventListener("click", function () {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    applyTheme();
  });
  preference.addEventListener("change", applyTheme);
  applyTheme();
  plotVisible(document);
})();
