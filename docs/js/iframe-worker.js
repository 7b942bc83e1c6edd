// A page opened from a file may not start workers, so its search runs in a hidden frame instead.
"use strict";
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script>
        window.postMessage = data => parent.dispatchEvent(new CustomEvent("search-said", { detail: data }));
        window.importScripts = () => {};
      <\/script><script src="${new URL(url, location.href)}"><\/script>`;
      const said = event => {
        const message = new MessageEvent("message", { data: event.detail });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      };
      window.addEventListener("search-said", said);
      frame.addEventListener("load", () => {
        this.tell = data => frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
        waiting.forEach(this.tell);
      });
      this.tell = data => waiting.push(data);
      this.terminate = () => { window.removeEventListener("search-said", said); frame.remove(); };
      document.body.append(frame);
    }
    postMessage(data) { this.tell(data); }
  };
}
